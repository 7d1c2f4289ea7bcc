"""The public ops of batch normalization: checks of their arguments, and the selection of an implementation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxgrad._src.choice.op import Op
from jaxgrad._src.core import checks
from jaxgrad._src.core.activations import Activation, activation_name
from jaxgrad._src.norm import calls, named_vmap
from jaxgrad._src.norm.arguments import (
    ACTIVATIONS,
    check_axis,
    check_dtype,
    check_epsilon,
    check_pair,
    check_residual,
    check_x,
)
from jaxgrad._src.norm.backend import PASSES, compute_dtype
from jaxgrad._src.norm.backends import BACKENDS, TWO_STEP_BACKENDS
from jaxgrad._src.norm.params import TrainingOptions
from jaxgrad._src.run.mesh_axes import MeshAxes

TRAINING = Op("batch_norm_training", PASSES, BACKENDS)
INFERENCE = Op("batch_norm_inference", PASSES, TWO_STEP_BACKENDS)

_TRAINING, _INFERENCE = "jaxgrad.batch_norm_training", "jaxgrad.batch_norm_inference"


@TRAINING.public
def batch_norm_training(
    x: jax.typing.ArrayLike,
    scale: jax.typing.ArrayLike,
    bias: jax.typing.ArrayLike,
    *,
    feature_axis: int = -1,
    epsilon: float = 1e-5,
    residual: jax.typing.ArrayLike | None = None,
    activation: Activation = None,
    statistics_dtype: jax.typing.DTypeLike | None = None,
    axis_name: str | Sequence[str] | None = None,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Batch normalization by the statistics of the batch.

    Computes the mean and the variance of each channel over all other axes, and

        y = act(scale * (x - mean) / sqrt(var + epsilon) + bias + residual)

    C is the number of channels, `x.shape[feature_axis]`.

    Args:
      x: the batch, of rank 2 or more: float32, float64, bfloat16 or float16. For the 16-bit dtypes, statistics and
        arithmetic are float32. With an axis of `vmap` in `axis_name`, the rank may be 1.
      scale: [C], of the dtype of x, or float32 if x is 16-bit.
      bias: [C], of the dtype of scale.
      feature_axis: the axis of the channels. Negative values count from the end.
      epsilon: a non-negative Python number that is added to the variance.
      residual: an array of the shape and dtype of x that is added before the activation; None for no residual.
      activation: "relu", "silu" or "gelu", or the function of `jax.nn` of that name; None for no activation. The
        gradient of relu at zero is zero, and gelu is the approximation by tanh, as in `jax.nn`.
      statistics_dtype: the dtype of the returned mean and variance: the dtype of x, or float32 if x is 16-bit. None for
        float32, or float64 if x is float64. The dtype does not affect the computation.
      axis_name: inside `vmap`, `shard_map` or `pmap`, the name or names of the axes over which the batch is split: the
        statistics are those of all examples or devices along these axes. None or no names for the statistics of x
        alone. Not needed under `jit` over a mesh, where x is the whole array.
      axis_index_groups: groups of devices along `axis_name` that share statistics, all of the same size, as in
        `jax.lax.psum`. None for one group. `shard_map` accepts groups only with `check_vma=False`, and `vmap` none.
      implementation: "cpu" for the C++ kernels, "cuda" for jaxgrad's CUDA kernels, "cudnn" for cuDNN, "xla" for XLA,
        None for the fastest available. An implementation that is given runs or raises. `jaxgrad.explain` reports what
        None selects.

    Returns:
      A triple `(y, mean, var)`:

      y: the normalized batch, of the shape and dtype of x.
      mean: [C], the mean of each channel.
      var: [C], the biased variance of each channel: the mean of (x - mean)^2.

    Raises:
      TypeError: an array has an unsupported dtype, statistics_dtype is not one of the dtypes above, or feature_axis,
        epsilon or axis_name has the wrong type.
      ValueError: the shape of an array does not fit, feature_axis is out of range, epsilon is negative or not finite,
        activation or implementation is unknown, axis_name is not an axis of an enclosing `vmap`, `shard_map` or `pmap`,
        axis_index_groups differ in size or are given for an axis of `vmap` or without axis_name; or a forced
        implementation does not support the call, or is lowered for another platform.
      RuntimeError: a forced implementation cannot be loaded.

    Notes:
      Accuracy. The variance is computed from deviations, so it stays accurate where the mean is much larger than the
      standard deviation, unlike E[x^2] - E[x]^2. Internally the mean has twice the digits of its dtype, which keeps y
      and the gradients accurate too. cuDNN's mean has the digits of its dtype alone: the relative error of y and of
      the gradients is about eps |mean| / deviation, and that of the variance is the square of it, with eps of float32,
      or float64 for float64 arrays. None selects cuDNN only where the CUDA kernels are missing, for 16-bit x, whose
      rounding is a larger error.
      If a channel contains an infinity, cuDNN's mean is NaN. If a channel has no elements, its mean and variance are
      NaN.

      Reproducibility. Results of the CPU kernels do not depend on the number of threads. The CUDA kernels return the
      same bits in every run.

      Differentiation. Reverse mode works to any order and through all three results: the first derivative uses the
      kernels, higher derivatives run on XLA. The residuals are x, scale, mean and inverse standard deviation, with an
      activation also bias, and with silu or gelu also `residual`. With relu and `residual`, y replaces both. Forward
      mode requires `jaxgrad.forward_mode`.

      Several devices. If the batch is split over devices, their statistics are merged by sums of [C] arrays. cuDNN
      cannot merge them, so XLA replaces cuDNN there.

      Named axes of `vmap`. The call under `vmap` is one call for the whole batch, on the same kernels, and the mean and
      the variance have no mapped axis, as `out_axes=None` requires. Gradients taken outside of the `vmap` run on the
      kernels. Gradients taken inside, as in `jax.vmap(jax.grad(loss), axis_name="batch")`, run on XLA; they are those
      of the sum of all losses, as for `jax.lax.pmean`.

      The formulas are those of Ioffe and Szegedy, "Batch Normalization" (2015).

    Examples:
      >>> x = jax.random.normal(jax.random.key(0), (8, 32, 32, 16))
      >>> y, mean, var = jaxgrad.batch_norm_training(x, jnp.ones(16), jnp.zeros(16), activation="relu")
      >>> y.shape, mean.shape, var.shape
      ((8, 32, 32, 16), (16,), (16,))
      >>> running_mean = 0.9 * jnp.zeros(16) + 0.1 * mean
    """
    activation = activation_name(_TRAINING, activation, ACTIVATIONS)
    TRAINING.check_implementation(implementation)
    epsilon = check_epsilon(_TRAINING, epsilon)
    mesh_axes, vmap_axes = _check_axis_name(axis_name, axis_index_groups)
    channels = {"scale": scale, "bias": bias}
    x, feature_axis, (scale, bias) = _check_arrays(
        _TRAINING, x, feature_axis, channels, smallest_rank=1 if vmap_axes else 2
    )
    residual = check_residual(_TRAINING, residual, x)
    dtype = _check_statistics_dtype(statistics_dtype, x)
    if mesh_axes is not None:
        x = mesh_axes.pvary(x)
    options = TrainingOptions(feature_axis, epsilon, activation, dtype, implementation, mesh_axes, vmap_axes)
    y, mean, var = named_vmap.training(_train, options, x, scale, bias, residual)
    return y, mean, var


def _train(
    options: TrainingOptions, x: jax.Array, scale: jax.Array, bias: jax.Array, residual: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A call whose statistics are those of x, or of the shards of x along the mesh axes."""
    names = ("feature_axis", "epsilon", "activation", "statistics_dtype", "mesh_axes")
    settings = {name: getattr(options, name) for name in names}
    return calls.by_own_statistics(TRAINING, options.implementation, x, scale, bias, residual, **settings)


@INFERENCE.public
def batch_norm_inference(
    x: jax.typing.ArrayLike,
    scale: jax.typing.ArrayLike,
    bias: jax.typing.ArrayLike,
    mean: jax.typing.ArrayLike,
    var: jax.typing.ArrayLike,
    *,
    feature_axis: int = -1,
    epsilon: float = 1e-5,
    implementation: str | None = None,
) -> jax.Array:
    """Batch normalization by given statistics.

    Computes y = scale * (x - mean) / sqrt(var + epsilon) + bias. C is the number of channels, `x.shape[feature_axis]`.

    Args:
      x: an array of rank 2 or more: float32, float64, bfloat16 or float16. For the 16-bit dtypes, arithmetic is
        float32.
      scale: [C], of the dtype of x, or float32 if x is 16-bit.
      bias: [C], of the dtype of scale.
      mean: [C], of the dtype of x, or float32 if x is 16-bit.
      var: [C], of the dtype of mean.
      feature_axis: the axis of the channels. Negative values count from the end.
      epsilon: a non-negative Python number that is added to the variance.
      implementation: "cpu" for the C++ kernels, "cuda" for jaxgrad's CUDA kernels, "xla" for XLA, None for the fastest
        available. An implementation that is given runs or raises. `jaxgrad.explain` reports what None selects.

    Returns:
      y, of the shape and dtype of x.

    Raises:
      TypeError: an array has an unsupported dtype, or feature_axis or epsilon has the wrong type.
      ValueError: the shape of an array does not fit, feature_axis is out of range, epsilon is negative or not finite,
        or implementation is unknown; or a forced implementation is lowered for another platform
        or has symbolic shapes.
      RuntimeError: a forced implementation cannot be loaded.

    Notes:
      Reverse mode works to any order and for all five arrays. The mean and the variance do not depend on x, as in
      fine-tuning with frozen statistics. Forward mode requires `jaxgrad.forward_mode`. The formulas are those of Ioffe
      and Szegedy, "Batch Normalization" (2015).

    Examples:
      >>> x = jax.random.normal(jax.random.key(0), (8, 32, 32, 16))
      >>> mean, var = jnp.zeros(16), jnp.ones(16)
      >>> y = jaxgrad.batch_norm_inference(x, jnp.ones(16), jnp.zeros(16), mean, var)
      >>> y.shape
      (8, 32, 32, 16)
    """
    INFERENCE.check_implementation(implementation)
    epsilon = check_epsilon(_INFERENCE, epsilon)
    channels = {"scale": scale, "bias": bias, "mean": mean, "var": var}
    x, feature_axis, arrays = _check_arrays(_INFERENCE, x, feature_axis, channels)
    return calls.by_given_statistics(INFERENCE, implementation, x, *arrays, feature_axis=feature_axis, epsilon=epsilon)


def _check_axis_name(axis_name: Any, axis_index_groups: Any) -> tuple[MeshAxes | None, tuple[str, ...]]:
    """Returns the axes of a mesh and the axes of `vmap` among the names."""
    if axis_name is not None and (isinstance(axis_name, bytes) or not isinstance(axis_name, (str, Sequence))):
        raise TypeError(f"{_TRAINING}: axis_name must be a name, names or None, got {type(axis_name).__name__}")
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name or ())
    if not axes:  # as in jax.lax.pmean
        if axis_index_groups is not None:
            raise ValueError(f"{_TRAINING}: axis_index_groups requires axis_name, got axis_name={axis_name!r}")
        return None, ()
    if not all(map(_is_bound, axes)):
        raise ValueError(
            f"{_TRAINING}: axis_name must name axes of the enclosing shard_map, pmap or vmap, got {axis_name!r}"
        )
    manual = jax.sharding.get_abstract_mesh().manual_axes
    vmap_axes = tuple(axis for axis in axes if axis not in manual)
    of_mesh = tuple(axis for axis in axes if axis in manual)
    if axis_index_groups is None:
        return MeshAxes(of_mesh) if of_mesh else None, vmap_axes
    if vmap_axes:
        raise ValueError(f"{_TRAINING}: axis_index_groups must be None for axes of vmap, got {axis_index_groups}")
    is_array = isinstance(axis_index_groups, np.ndarray) and axis_index_groups.ndim > 0
    if isinstance(axis_index_groups, str) or not (is_array or isinstance(axis_index_groups, Sequence)):
        raise TypeError(
            f"{_TRAINING}: axis_index_groups must be groups of ints or None, got {type(axis_index_groups).__name__}"
        )
    groups = tuple(checks.as_ints(_TRAINING, "axis_index_groups", group) for group in axis_index_groups)
    if len({len(group) for group in groups}) != 1:
        raise ValueError(f"{_TRAINING}: axis_index_groups must be groups of equal size, got {axis_index_groups}")
    size = math.prod(map(lax.axis_size, of_mesh))
    if sorted(index for group in groups for index in group) != [*range(size)]:
        raise ValueError(
            f"{_TRAINING}: axis_index_groups must be groups with each index from 0 to {size - 1} once, "
            f"got {axis_index_groups}"
        )
    return MeshAxes(of_mesh, groups), ()


def _is_bound(axis_name: str) -> bool:
    """Whether an enclosing transformation has an axis of this name."""
    try:
        lax.axis_size(axis_name)
    except (NameError, TypeError, ValueError):  # of values that are no names
        return False
    return True


def _check_arrays(
    op: str, x: Any, feature_axis: Any, channels: dict[str, Any], smallest_rank: int = 2
) -> tuple[jax.Array, int, tuple[jax.Array, ...]]:
    """Returns x, the non-negative feature axis, and the [C] arrays, which are checked in pairs of one dtype."""
    x = check_x(op, x, smallest_rank)
    feature_axis = check_axis(op, "feature_axis", feature_axis, x)
    arrays = {name: checks.as_array(op, name, value) for name, value in channels.items()}
    for name, array in arrays.items():
        checks.check_shape(op, name, array, ("C",), (x.shape[feature_axis],))
    pairs = list(arrays.items())
    for first in range(0, len(pairs), 2):
        check_pair(op, dict(pairs[first : first + 2]), x)
    return x, feature_axis, tuple(arrays.values())


def _check_statistics_dtype(dtype: Any, x: jax.Array) -> np.dtype:
    if dtype is None:
        return compute_dtype(x)
    try:
        hash(dtype)  # refuses arrays, which have a dtype and are none
        dtype = jnp.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{_TRAINING}: statistics_dtype must be a dtype or None, got {dtype!r}") from error
    check_dtype(_TRAINING, "statistics_dtype", dtype, x)
    return dtype
