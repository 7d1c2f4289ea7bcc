"""The public ops `layer_norm` and `rms_norm`, which normalize rows: the normalized axes as one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxgrad._src.choice.op import Op
from jaxgrad._src.core.activations import Activation, activation_name
from jaxgrad._src.norm import calls
from jaxgrad._src.norm.arguments import (
    ACTIVATIONS,
    check_axis,
    check_epsilon,
    check_parameters,
    check_residual,
    check_x,
)
from jaxgrad._src.norm.backend import PASSES
from jaxgrad._src.norm.backends import TWO_STEP_BACKENDS

LAYER_NORM = Op("layer_norm", PASSES, TWO_STEP_BACKENDS)
RMS_NORM = Op("rms_norm", PASSES, TWO_STEP_BACKENDS)


@LAYER_NORM.public
def layer_norm(
    x: jax.typing.ArrayLike,
    scale: jax.typing.ArrayLike | None,
    bias: jax.typing.ArrayLike | None,
    *,
    axis: int | Sequence[int] = -1,
    epsilon: float = 1e-5,
    residual: jax.typing.ArrayLike | None = None,
    activation: Activation = None,
    implementation: str | None = None,
) -> jax.Array:
    """Layer normalization: by the mean and the variance over the given axes.

    Computes, with the biased variance,

        y = act(scale * (x - mean) / sqrt(var + epsilon) + bias + residual)

    Args:
      x: an array of rank 1 or more: float32, float64, bfloat16 or float16. For the 16-bit dtypes, statistics and
        arithmetic are float32.
      scale: an array of the sizes of the normalized axes, in their order in x, of the dtype of x, or float32 if x is
        16-bit; None for ones.
      bias: of the shape and dtype of scale; None for zeros.
      axis: the normalized axes, an int or a sequence of ints. Negative values count from the end. The last axes are
        the fastest: others are transposed.
      epsilon: a non-negative Python number that is added to the variance. PyTorch, ONNX and equinox have 1e-5 too,
        flax 1e-6.
      residual: an array of the shape and dtype of x that is added before the activation; None for no residual.
      activation: "relu", "silu" or "gelu", or the function of `jax.nn` of that name; None for no activation. The
        gradient of relu at zero is zero, and gelu is the approximation by tanh, as in `jax.nn`.
      implementation: "cpu" for the C++ kernels, "cuda" for jaxgrad's CUDA kernels, "xla" for XLA, None for the fastest
        available. An implementation that is given runs or raises. `jaxgrad.explain` reports what None selects.

    Returns:
      y, of the shape and dtype of x.

    Raises:
      TypeError: an array has an unsupported dtype, or axis or epsilon has the wrong type.
      ValueError: the shape of an array does not fit, axis is out of range, repeated or empty, epsilon is negative or
        not finite, or activation or implementation is unknown; or a forced implementation does not support the call, or
        is lowered for another platform.
      RuntimeError: a forced implementation cannot be loaded.

    Notes:
      Accuracy. The variance is computed from deviations, so it stays accurate where the mean is much larger than the
      standard deviation, unlike E[x^2] - E[x]^2.

      Differentiation. Reverse mode works to any order: the first derivative uses the kernels, higher derivatives run on
      XLA. The residuals are those of `jaxgrad.batch_norm_training`. Forward mode requires `jaxgrad.forward_mode`.

      Several devices. A mesh may split the axes that are not normalized, without communication. Where a kernel runs,
      split normalized axes are gathered.

      The formulas are those of Ba, Kiros and Hinton, "Layer Normalization" (2016).

    Examples:
      >>> x = jax.random.normal(jax.random.key(0), (8, 128, 64))
      >>> jaxgrad.layer_norm(x, jnp.ones(64), jnp.zeros(64)).shape
      (8, 128, 64)
      >>> jaxgrad.layer_norm(x, None, None, axis=(-2, -1)).shape
      (8, 128, 64)
    """
    return _normalize_rows(LAYER_NORM, x, scale, bias, axis, epsilon, residual, activation, implementation)


@RMS_NORM.public
def rms_norm(
    x: jax.typing.ArrayLike,
    scale: jax.typing.ArrayLike | None,
    bias: jax.typing.ArrayLike | None = None,
    *,
    axis: int | Sequence[int] = -1,
    epsilon: float = 1e-6,
    residual: jax.typing.ArrayLike | None = None,
    activation: Activation = None,
    implementation: str | None = None,
) -> jax.Array:
    """RMS normalization: by the root mean square over the given axes, without a mean.

    Computes

        y = act(scale * x / sqrt(mean(x^2) + epsilon) + bias + residual)

    Args:
      x: as in `jaxgrad.layer_norm`, like the following arguments.
      scale: of the sizes of the normalized axes; None for ones.
      bias: of the shape and dtype of scale; None for zeros.
      axis: the normalized axes.
      epsilon: a non-negative Python number that is added to the mean of the squares. flax has 1e-6 too, equinox and
        ONNX 1e-5, and PyTorch the eps of the dtype.
      residual: an array that is added before the activation; None for no residual.
      activation: "relu", "silu" or "gelu"; None for no activation.
      implementation: "cpu", "cuda", "xla" or None.

    Returns:
      y, of the shape and dtype of x.

    Raises:
      TypeError, ValueError, RuntimeError: as in `jaxgrad.layer_norm`.

    Notes:
      Differentiation and several devices are as in `jaxgrad.layer_norm`.

      The formulas are those of Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).

    Examples:
      >>> x = jax.random.normal(jax.random.key(0), (8, 128, 64))
      >>> jaxgrad.rms_norm(x, jnp.ones(64)).shape
      (8, 128, 64)
    """
    return _normalize_rows(RMS_NORM, x, scale, bias, axis, epsilon, residual, activation, implementation)


def _normalize_rows(
    op: Op,
    x: Any,
    scale: Any,
    bias: Any,
    axis: Any,
    epsilon: Any,
    residual: Any,
    activation: Any,
    implementation: str | None,
) -> jax.Array:
    name = f"jaxgrad.{op.name}"
    activation = activation_name(name, activation, ACTIVATIONS)
    op.check_implementation(implementation)
    epsilon = check_epsilon(name, epsilon)
    x = check_x(name, x, smallest_rank=1)
    axes = _check_axes(name, axis, x)
    sizes = tuple(x.shape[each] for each in axes)
    dims = [f"x.shape[{each}]" for each in axes]
    scale, bias = check_parameters(name, scale, bias, dims, sizes, x)
    residual = check_residual(name, residual, x)
    last = tuple(range(x.ndim - len(axes), x.ndim))
    others = tuple(size for each, size in enumerate(x.shape) if each not in axes)

    def as_rows(array: jax.Array) -> jax.Array:
        array = array if axes == last else jnp.moveaxis(array, axes, last)
        return array if len(axes) == 1 else array.reshape(*others, math.prod(sizes))

    y, _, _ = calls.by_own_statistics(
        op,
        implementation,
        as_rows(x),
        scale.reshape(-1) if scale.ndim != 1 else scale,
        bias.reshape(-1) if bias.ndim != 1 else bias,
        None if residual is None else as_rows(residual),
        feature_axis=len(others),
        sample_axes=len(others),
        num_groups=1,
        centered=op is LAYER_NORM,
        epsilon=epsilon,
        activation=activation,
    )
    y = y if len(axes) == 1 else y.reshape(*others, *sizes)
    return y if axes == last else jnp.moveaxis(y, last, axes)


def _check_axes(op: str, axis: Any, x: jax.Array) -> tuple[int, ...]:
    """Returns the normalized axes, not negative and in ascending order."""
    given = (axis,) if not isinstance(axis, Sequence) or isinstance(axis, str) else tuple(axis)
    axes = tuple(sorted(check_axis(op, "axis", each, x) for each in given))
    if not axes or len(set(axes)) != len(axes):
        raise ValueError(f"{op}: axis must be one axis or several different axes, got {axis}")
    return axes
