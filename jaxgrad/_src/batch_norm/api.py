"""Batch normalisation: the public ops and their checks.

The path of a call: `batch_norm_training` checks its arguments, `_batch_norm_vjp` holds the `jax.custom_vjp`,
`_batch_norm_units` wraps each pass for `jit`, `vmap` and meshes of devices, `_ffi` calls the handlers in
ffi/cpu/batch_norm_ffi.cc, which run ffi/cpu/batch_norm.cc, and those in ffi/cuda. The forward pass gives the statistics
and the normalised array. On the CPU these are two calls, so that a program which reads only the gradients, or only the
statistics, does not compute y.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrad import _batch_norm_cudnn, _batch_norm_tangents, _batch_norm_vjp, _checks, _ffi, _forward_mode
from jaxgrad._batch_norm_units import Spec
from jaxgrad._batch_norm_xla import compute_dtype
from jaxgrad._dispatch import IMPLEMENTATIONS, Op, cpu_kernel, symbolic_obstacle
from jaxgrad._partitioning import Devices, vary_alike

_TRAINING, _INFERENCE = "jaxgrad.batch_norm_training", "jaxgrad.batch_norm_inference"
_CPU = cpu_kernel("the CPU kernel takes every dtype and shape of this op", _ffi.cpu_problem)
_DISPATCH_TRAINING = Op(
    "batch_norm_training",
    (_CPU, _batch_norm_cudnn.KERNEL),
    units=_batch_norm_cudnn.UNITS,
    usual=_batch_norm_cudnn.USUAL,
)
_DISPATCH_INFERENCE = Op("batch_norm_inference", (_CPU,))


def batch_norm_training(
    x: jax.typing.ArrayLike,
    scale: jax.typing.ArrayLike,
    bias: jax.typing.ArrayLike,
    *,
    feature_axis: int = -1,
    epsilon: float = 1e-5,
    residual: jax.typing.ArrayLike | None = None,
    activation: str | None = None,
    statistics_dtype: jax.typing.DTypeLike | None = None,
    axis_name: str | Sequence[str] | None = None,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normalises each channel of a batch by its own mean and variance.

    With the mean and the variance of each channel taken over all other axes,

      y = act(scale * (x - mean) / sqrt(var + epsilon) + bias + residual)

    C is the number of channels, x.shape[feature_axis].

    The variance adds up squares of deviations from what is close to the mean, so it stays accurate where the mean is
    large beside the deviation, as E[x^2] - E[x]^2 does not; inside, the mean has twice its digits, so that y and the
    gradients stay accurate too. The CPU kernel merges blocks whose size and order are fixed: its results do not depend
    on the number of threads. cuDNN keeps the mean in one part: with it, and eps that of float32 (float64 where x is),
    y and the gradients are off by some eps |mean| / deviation, relative, and the variance by the square of that. None
    takes it for 16-bit x only, whose own rounding is larger. Where a channel holds an infinity, cuDNN's mean is NaN.

    Args:
      x: of rank 2 or more: float32, float64, bfloat16 or float16. The 16-bit types are storage: statistics and
        arithmetic are float32.
      scale: [C], of x's dtype or, where that has 16 bits, float32.
      bias: [C], of scale's dtype.
      feature_axis: the axis of the channels; negative ones count from the end.
      epsilon: what is added to the variance: a Python number, not negative.
      residual: added before the activation: of x's shape and dtype, or None.
      activation: "relu", or None for none. Its gradient at zero is zero, as that of `jax.nn.relu` is.
      statistics_dtype: the dtype of the mean and variance returned: x's own or, where that has 16 bits, float32. None
        is float32, for x of float64 float64. What is computed inside does not depend on it.
      axis_name: inside `shard_map` or `pmap`, the axis of the mesh, or axes, that the batch is spread over: the
        statistics are those of all its parts. None takes those of x alone. Under `jit` over a mesh they are those of
        the whole array without a name, however it is spread.
      axis_index_groups: the groups of devices along `axis_name` that have statistics in common, as `jax.lax.psum` takes
        them, of one size; None for one group of all. `shard_map` takes groups with `check_vma=False` only.
      implementation: None for the fastest known, "cpu" for the CPU kernels, "cudnn" for cuDNN, "xla" for plain XLA.
        `jaxgrad.explain` tells what None comes to.

    Returns:
      y: like x.
      mean: [C], the mean of each channel.
      var: [C], the biased variance of each channel: the mean square of x - mean.

    Raises:
      TypeError: an array's dtype is none of those above, or feature_axis or epsilon is not a number of the right kind.
      ValueError: a rank or a dimension does not fit, feature_axis is out of range, epsilon is negative or NaN, or
        activation or implementation is unknown; axis_name names no axis of a shard_map or pmap around the call;
        axis_index_groups are not of one size; `implementation="cudnn"` for what cuDNN cannot take; or a forced
        implementation is lowered for another platform than its own.
      RuntimeError: `implementation="cpu"` or `"cudnn"` where the compiled module or cuDNN cannot be loaded.

    Where the batch is spread over devices each one's own statistics are merged, by sums of arrays of [C]; the part of
    cuDNN that computes all at once is XLA's there.

    Reverse-mode differentiation works to any order and through all three results; the first uses the kernels, those
    above it XLA. Kept for it are x, scale, the mean and the inverse standard deviation, and with an activation the
    bias, or y if there is a residual too. Where a channel has no elements its mean and variance are NaN. Forward mode
    works inside `jaxgrad.forward_mode`. The formulas are those of Ioffe and Szegedy, "Batch Normalization" (2015).

    Example:
      >>> x = jax.random.normal(jax.random.key(0), (8, 32, 32, 16))
      >>> y, mean, var = jaxgrad.batch_norm_training(x, jnp.ones(16), jnp.zeros(16), activation="relu")
      >>> y.shape, mean.shape, var.shape
      ((8, 32, 32, 16), (16,), (16,))
    """
    _checks.check_choice(_TRAINING, "activation", activation, (None, "relu"))
    _checks.check_choice(_TRAINING, "implementation", implementation, IMPLEMENTATIONS)
    epsilon = _check_epsilon(_TRAINING, epsilon)
    x, feature_axis, (scale, bias) = _check_arrays(_TRAINING, x, feature_axis, {"scale": scale, "bias": bias})
    if residual is not None:
        residual = _checks.as_array(_TRAINING, "residual", residual)
        if residual.shape != x.shape:
            raise ValueError(f"{_TRAINING}: residual must have the shape of x, {x.shape}, got {residual.shape}")
        _checks.check_same_dtype(_TRAINING, "residual", residual, "x", x)
    dtype = _check_statistics_dtype(statistics_dtype, x)
    obstacle = symbolic_obstacle(x)
    relu = activation == "relu"
    found = None
    if obstacle is None:
        found = _batch_norm_cudnn.obstacle(x, feature_axis, relu, residual is not None, implementation)
    obstacles = {("cudnn", unit): found for unit in _batch_norm_cudnn.UNITS}
    routes = _DISPATCH_TRAINING.decide(implementation, obstacle, obstacles).routes
    devices = _check_axis_name(axis_name, axis_index_groups)
    if devices is not None:
        x = devices.mark(x)
    spec = Spec(feature_axis, epsilon, relu, dtype, routes["forward"], routes["backward"], devices)
    arrays = vary_alike(x, scale, bias, residual)
    y, mean, var = _forward_mode.call(_batch_norm_vjp.training, _batch_norm_tangents.TRAINING, spec, *arrays)
    return y, mean, var


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
    """Normalises each channel by a given mean and variance: y = scale * (x - mean) / sqrt(var + epsilon) + bias.

    C is the number of channels, x.shape[feature_axis].

    Args:
      x: of rank 2 or more: float32, float64, bfloat16 or float16. The 16-bit types are storage: arithmetic is float32.
      scale: [C], of x's dtype or, where that has 16 bits, float32.
      bias: [C], of scale's dtype.
      mean: [C], of x's dtype or, where that has 16 bits, float32.
      var: [C], of mean's dtype.
      feature_axis: the axis of the channels; negative ones count from the end.
      epsilon: what is added to the variance: a Python number, not negative.
      implementation: None for the fastest known, "cpu" for the CPU kernels, "xla" for plain XLA.
        `jaxgrad.explain` tells what None comes to.

    Returns:
      y: like x.

    Raises:
      TypeError: an array's dtype is none of those above, or feature_axis or epsilon is not a number of the right kind.
      ValueError: a rank or a dimension does not fit, feature_axis is out of range, epsilon is negative or NaN, or
        implementation is unknown; or `implementation="cpu"` is lowered for another platform.
      RuntimeError: `implementation="cpu"` where the compiled module cannot be loaded.

    Reverse-mode differentiation works to any order, for all five arrays; the statistics are constants of x, as where a
    network is fine-tuned with frozen statistics. Forward mode works inside `jaxgrad.forward_mode`. The formulas are
    those of Ioffe and Szegedy (2015).

    Example:
      >>> x = jax.random.normal(jax.random.key(0), (8, 32, 32, 16))
      >>> mean, var = jnp.zeros(16), jnp.ones(16)
      >>> y = jaxgrad.batch_norm_inference(x, jnp.ones(16), jnp.zeros(16), mean, var)
      >>> y.shape
      (8, 32, 32, 16)
    """
    _checks.check_choice(_INFERENCE, "implementation", implementation, IMPLEMENTATIONS)
    epsilon = _check_epsilon(_INFERENCE, epsilon)
    channels = {"scale": scale, "bias": bias, "mean": mean, "var": var}
    x, feature_axis, arrays = _check_arrays(_INFERENCE, x, feature_axis, channels)
    route = _DISPATCH_INFERENCE.decide(implementation, symbolic_obstacle(x)).route
    spec = Spec(feature_axis, epsilon, False, None, route, route)
    return _forward_mode.call(_batch_norm_vjp.inference, _batch_norm_tangents.INFERENCE, spec, *vary_alike(x, *arrays))


def _check_axis_name(axis_name: Any, axis_index_groups: Any) -> Devices | None:
    if axis_name is None:
        if axis_index_groups is not None:
            raise ValueError(f"{_TRAINING}: axis_index_groups needs an axis_name")
        return None
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    known = jax.sharding.get_abstract_mesh().manual_axes
    if not axes or any(axis not in known for axis in axes):
        raise ValueError(
            f"{_TRAINING}: axis_name must name axes of the shard_map or pmap that the call is in, one of {known}, "
            f"got {axis_name!r}"
        )
    if axis_index_groups is None:
        return Devices(axes)
    groups = tuple(tuple(map(int, group)) for group in axis_index_groups)
    if len({len(group) for group in groups}) != 1:
        raise ValueError(f"{_TRAINING}: axis_index_groups must be groups of one size, got {axis_index_groups}")
    return Devices(axes, groups)


def _check_epsilon(op: str, epsilon: Any) -> float:
    if isinstance(epsilon, bool) or not isinstance(epsilon, (int, float, np.integer, np.floating)):
        raise TypeError(f"{op}: epsilon must be a Python number, got {type(epsilon).__name__}")
    if not 0 <= epsilon < math.inf:
        raise ValueError(f"{op}: epsilon must be finite and not negative, got {epsilon}")
    return float(epsilon)


def _check_arrays(
    op: str, x: Any, feature_axis: Any, channels: dict[str, Any]
) -> tuple[jax.Array, int, tuple[jax.Array, ...]]:
    """x, the axis counted from the start, and the arrays of [C]: pairs of which the second has the first's dtype."""
    x = _checks.as_array(op, "x", x)
    _checks.check_floating(op, "x", x)
    if x.ndim < 2:
        raise ValueError(f"{op}: x must have rank 2 or more, got rank {x.ndim}, {x.shape}")
    if isinstance(feature_axis, bool) or not isinstance(feature_axis, (int, np.integer)):
        raise TypeError(f"{op}: feature_axis must be an int, got {type(feature_axis).__name__}")
    if not -x.ndim <= feature_axis < x.ndim:
        raise ValueError(
            f"{op}: feature_axis must lie in [{-x.ndim}, {x.ndim}), as x has rank {x.ndim}, got {feature_axis}"
        )
    feature_axis = int(feature_axis) % x.ndim
    arrays = {name: _checks.as_array(op, name, value) for name, value in channels.items()}
    for name, array in arrays.items():
        _checks.check_shape(op, name, array, ("C",), (x.shape[feature_axis],))
    names = list(arrays)
    for first, second in zip(names[::2], names[1::2], strict=True):
        _check_channel_dtype(op, first, arrays[first].dtype, x)
        _checks.check_same_dtype(op, second, arrays[second], first, arrays[first])
    return x, feature_axis, tuple(arrays.values())


def _check_channel_dtype(op: str, name: str, dtype: Any, x: jax.Array) -> None:
    allowed = list(dict.fromkeys([x.dtype.name, compute_dtype(x).name]))
    if dtype.name not in allowed:
        raise TypeError(
            f"{op}: {name} must have the dtype {' or '.join(allowed)}, as x has {x.dtype.name}, got {dtype.name}"
        )


def _check_statistics_dtype(dtype: Any, x: jax.Array) -> np.dtype:
    if dtype is None:
        return compute_dtype(x)
    try:
        dtype = jnp.dtype(dtype)
    except TypeError as error:
        raise TypeError(f"{_TRAINING}: statistics_dtype must be a dtype or None, got {dtype!r}") from error
    _check_channel_dtype(_TRAINING, "statistics_dtype", dtype, x)
    return dtype
