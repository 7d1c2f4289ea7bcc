"""The public ops of pooling: checks of their arguments, and the selection of an implementation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxgrad._src.choice.op import Op
from jaxgrad._src.choice.selection import reject_symbolic_shapes, select
from jaxgrad._src.core import checks, marks
from jaxgrad._src.pool import autodiff
from jaxgrad._src.pool.backend import AVG_PASSES, MAX_PASSES
from jaxgrad._src.pool.backends import BACKENDS
from jaxgrad._src.pool.params import Pairs, PoolParams, Window
from jaxgrad._src.run import forward_mode
from jaxgrad._src.run.derivative_maps import JvpRules

MAX_POOL = Op("max_pool", MAX_PASSES, BACKENDS)
AVG_POOL = Op("avg_pool", AVG_PASSES, BACKENDS)

_MAX_POOL, _AVG_POOL = "jaxgrad.max_pool", "jaxgrad.avg_pool"
_PADDINGS = ("SAME", "VALID", "SAME_LOWER")


@MAX_POOL.public
def max_pool(
    inputs: jax.typing.ArrayLike,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: str | Sequence[tuple[int, int]] = "VALID",
    *,
    window_dilation: Sequence[int] | None = None,
    feature_axis: int = -1,
    implementation: str | None = None,
) -> jax.Array:
    """The maximum of each window of the spatial axes, with the arguments of `flax.linen.max_pool`.

    Args:
      inputs: [batch..., spatial..., C], or with `feature_axis` [batch..., C, spatial...]: float32, float64, bfloat16 or
        float16. There are as many spatial axes as `window_shape` has elements, and any number of axes of the batch,
        or none.
      window_shape: the size of the window along each spatial axis.
      strides: the distance between windows along each spatial axis; None for 1.
      padding: "VALID" for none; "SAME" for as much as gives ceil(size / stride) windows along an axis, of which
        "SAME_LOWER" adds the odd element before the axis and not after it; or for each spatial axis a pair: how many
        elements are added before and after it. Added elements are -infinity. Negative numbers remove elements.
      window_dilation: the distance between the elements of a window along each spatial axis; None for 1.
      feature_axis: the axis of the channels: the last one, or the one before the spatial axes. Negative values count
        from the end.
      implementation: "cpu" for the C++ kernels, "cuda" for jaxgrad's CUDA kernels, "xla" for XLA, None for the fastest
        one in measurements. An implementation that is given runs or raises. `jaxgrad.explain` reports
        what None selects.

    Returns:
      The maxima, of the dtype of `inputs` and with the number of windows in place of each spatial size. A maximum is
      NaN if an element of its window is NaN, and +0 is larger than -0. For some shapes, XLA on a CPU loses NaN and
      takes the later one of two zeros.

    Raises:
      TypeError: inputs has an unsupported dtype, or another argument has the wrong type.
      ValueError: window_shape, strides, padding or window_dilation is out of range or has the wrong length, the rank of
        inputs is too small, feature_axis is not one of the two axes, or implementation is unknown; or
        `implementation="cpu"` or `"cuda"` is lowered for another platform, has symbolic shapes, or more than three
        spatial axes, or arrays or windows are too large for the CUDA kernels.
      RuntimeError: a forced implementation cannot be loaded.

    Notes:
      Gradients. The gradient of a window goes to the element that XLA's `select_and_scatter` selects for
      `jax.lax.reduce_window`: in a window without NaN, the first maximum in row-major order. Of two elements, one of
      which is NaN, the later one is selected. Where an added element is selected, the gradient is dropped.
      The CPU kernels return the bits of XLA, but for subnormal numbers, which XLA flushes to zero: the gradients of
      the windows that select an element are added in row-major order, each sum rounded to the dtype. The CUDA kernels
      add in the same order, in float32 for 16-bit dtypes, and without atomic operations.

      Differentiation. Reverse mode works to any order, with window dilation too, which `jax.lax.reduce_window` cannot
      differentiate. Forward mode requires `jaxgrad.forward_mode`.

      Several devices. A mesh may split the batch and the channels.

    Examples:
      >>> x = jax.random.normal(jax.random.key(0), (8, 56, 56, 64))
      >>> jaxgrad.max_pool(x, (3, 3), strides=(2, 2), padding="SAME").shape
      (8, 28, 28, 64)
      >>> jaxgrad.max_pool(jnp.moveaxis(x, -1, 1), (2, 2), (2, 2), feature_axis=1).shape
      (8, 64, 28, 28)
    """
    MAX_POOL.check_implementation(implementation)
    x = _check_inputs(_MAX_POOL, inputs)
    x, window = _window(_MAX_POOL, x, window_shape, strides, padding, window_dilation, feature_axis)
    return _call(MAX_POOL, autodiff.max_pool, autodiff.MAX_RULES, x, window, implementation)


@AVG_POOL.public
def avg_pool(
    inputs: jax.typing.ArrayLike,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: str | Sequence[tuple[int, int]] = "VALID",
    count_include_pad: bool = True,
    *,
    window_dilation: Sequence[int] | None = None,
    feature_axis: int = -1,
    implementation: str | None = None,
) -> jax.Array:
    """The mean of each window of the spatial axes, with the arguments of `flax.linen.avg_pool`.

    Args:
      inputs: as in `jaxgrad.max_pool`.
      window_shape: the size of the window along each spatial axis.
      strides: the distance between windows along each spatial axis; None for 1.
      padding: as in `jaxgrad.max_pool`, but added elements are zero.
      count_include_pad: whether the mean counts added elements: it divides the sum by the size of the window, or by the
        number of elements of the window that are not added.
      window_dilation: the distance between the elements of a window along each spatial axis; None for 1.
      feature_axis: the axis of the channels: the last one, or the one before the spatial axes. Negative values count
        from the end.
      implementation: "cpu" for the C++ kernels, "cuda" for jaxgrad's CUDA kernels, "xla" for XLA, None for the fastest
        one in measurements. An implementation that is given runs or raises. `jaxgrad.explain` reports
        what None selects.

    Returns:
      The means, of the dtype of `inputs` and with the number of windows in place of each spatial size. Without
      `count_include_pad`, the mean of a window of added elements alone is NaN.

    Raises:
      TypeError, ValueError, RuntimeError: as `jaxgrad.max_pool`, and TypeError if count_include_pad is not a bool.

    Notes:
      For 16-bit dtypes, sums are float32: a mean is rounded once, and is finite where the sum is beyond the largest
      float16. Without `count_include_pad`, x is converted to float32 first, which takes memory. flax returns float32
      there. jaxgrad's kernels add in row-major order, but for windows of whole planes and of more than 256 elements.

      Reverse mode works to any order. Forward mode requires `jaxgrad.forward_mode`. A mesh may split the batch and the
      channels.

    Examples:
      >>> x = jax.random.normal(jax.random.key(0), (8, 56, 56, 64))
      >>> jaxgrad.avg_pool(x, (3, 3), strides=(2, 2), padding="SAME", count_include_pad=False).shape
      (8, 28, 28, 64)
    """
    AVG_POOL.check_implementation(implementation)
    x = _check_inputs(_AVG_POOL, inputs)
    x, window = _window(_AVG_POOL, x, window_shape, strides, padding, window_dilation, feature_axis)
    count_include_pad = checks.check_flag(_AVG_POOL, "count_include_pad", count_include_pad)
    pool = partial(_call, AVG_POOL, autodiff.sum_pool, autodiff.SUM_RULES)
    if count_include_pad:
        return pool(x, window, implementation, divisor=math.prod(window.shape))
    wide = jnp.promote_types(x.dtype, jnp.float32)
    total = pool(x.astype(wide), window, implementation)
    return (total / jnp.asarray(_counts(window, x.shape), wide)).astype(x.dtype)


def _counts(window: Window, x_shape: tuple[Any, ...]) -> Any:
    """Returns the number of elements of each window that are not padding, in a shape that broadcasts with y."""
    y_shape, counts = window.y_shape(x_shape), np.ones((), int)
    axes = range(window.ndim)
    for axis, size, number in zip(axes, window.spatial(x_shape), window.spatial(y_shape), strict=True):
        xp = np if isinstance(number, int) else jnp  # symbolic
        start = xp.arange(number) * window.strides[axis] - window.padding[axis][0]
        dilation = window.dilation[axis]
        first = xp.maximum(0, -(start // dilation))  # the least tap at or after the first element
        end = xp.minimum(window.shape[axis], -((start - size) // dilation))
        shape = window.of_all_axes(tuple(number if other == axis else 1 for other in axes), 1, len(x_shape))
        counts = counts * xp.maximum(0, end - first).reshape(shape)
    return counts


def _check_inputs(op: str, inputs: Any) -> jax.Array:
    x = checks.as_array(op, "inputs", inputs)
    checks.check_floating(op, "inputs", x)
    return x


@marks.exempt()  # inside `jaxgrad.accelerate`, the selection of this call stands
def _call(
    op: Op,
    function: Callable[..., jax.Array],
    rules: JvpRules,
    x: jax.Array,
    window: Window,
    implementation: str | None,
    divisor: int = 1,
) -> jax.Array:
    """Calls the `jax.custom_vjp` function of an op, for an array with an axis of the batch."""
    has_batch = x.ndim > window.ndim + 1
    batched = x if has_batch else lax.expand_dims(x, (0,))
    params = PoolParams(op.name, window, window.spatial(x.shape), (), divisor)
    candidates = select(op, implementation, params.problem(batched), reject_symbolic_shapes(x)).candidates
    params = dataclasses.replace(params, candidates=tuple(candidates.items()))
    y = forward_mode.call(function, rules, params, batched)
    return y if has_batch else lax.squeeze(y, (0,))


def _window(
    op: str, x: jax.Array, window_shape: Any, strides: Any, padding: Any, dilation: Any, feature_axis: Any
) -> tuple[jax.Array, Window]:
    """Returns x without the elements that negative padding removes, and the windows, after checks of the arguments."""
    sizes = checks.as_ints(op, "window_shape", window_shape)
    if not sizes:
        raise ValueError(f"{op}: window_shape must have an element for each spatial axis, got none")
    ndim = len(sizes)
    if x.ndim < ndim + 1:
        raise ValueError(f"{op}: inputs must have rank {ndim + 1} or more for {ndim} spatial axes, got rank {x.ndim}")
    steps = _positive(op, "strides", (1,) * ndim if strides is None else strides, ndim)
    gaps = _positive(op, "window_dilation", (1,) * ndim if dilation is None else dilation, ndim)
    sizes = _positive(op, "window_shape", sizes, ndim)
    axis = checks.as_int(op, "feature_axis", feature_axis)
    last, first = x.ndim - 1, x.ndim - 1 - ndim
    if axis not in (last, first, -1, first - x.ndim):
        raise ValueError(
            f"{op}: feature_axis must be the last axis, {last} or -1, or the one before the spatial axes, {first} or "
            f"{first - x.ndim}, got {axis}"
        )
    window = Window(sizes, steps, ((0, 0),) * ndim, gaps, channels_last=axis in (last, -1))
    window = dataclasses.replace(window, padding=_pairs(op, padding, window.spatial(x.shape), window))
    x, window = _cropped(x, window)
    if all(isinstance(size, int) for size in x.shape):
        _check_sizes(op, x, window)
    return x, window


def _cropped(x: jax.Array, window: Window) -> tuple[jax.Array, Window]:
    """Removes as many elements as negative padding says; where there are too few, padding of the other side too."""
    if not any(isinstance(size, int) and size < 0 for pair in window.padding for size in pair):
        return x, window
    starts, sizes, pads = [], [], []
    for size, (low, high) in zip(window.spatial(x.shape), window.padding, strict=True):
        is_static = isinstance(size, int)
        first = min(size, -low) if low < 0 and is_static else max(0, -low)
        last = min(size - first, -high) if high < 0 and is_static else max(0, -high)
        low, high = low + first, high + last
        starts.append(first)
        sizes.append(size - first - last)
        pads.append((max(0, low + min(0, high)), max(0, high + min(0, low))))
    begin = window.of_all_axes(tuple(starts), 0, x.ndim)
    cropped = window.with_spatial(x.shape, tuple(sizes))
    end = [start + size for start, size in zip(begin, cropped, strict=True)]
    return lax.slice(x, begin, end), dataclasses.replace(window, padding=tuple(pads))


def _check_sizes(op: str, x: jax.Array, window: Window) -> None:
    """Raises ValueError where sizes do not fit into 63 bits, which JAX does not check."""
    axes = zip(window.spatial(x.shape), window.shape, window.strides, window.padding, window.dilation, strict=True)
    reaches = [max(size + sum(pair) + (extent - 1) * gap, stride) for size, extent, stride, pair, gap in axes]
    if max(*reaches, math.prod(window.y_shape(x.shape)) * 8) >= 1 << 62:
        raise ValueError(
            f"{op}: the sizes that window_shape, strides, padding and window_dilation make of inputs {x.shape} must "
            f"fit into 62 bits, got {window.shape}, {window.strides}, {window.padding} and {window.dilation}"
        )


def _positive(op: str, name: str, values: Any, ndim: int) -> tuple[int, ...]:
    found = checks.as_ints(op, name, values)
    if len(found) != ndim:
        raise ValueError(f"{op}: {name} must have {ndim} elements, as many as window_shape, got {found}")
    if not all(value > 0 for value in found):
        raise ValueError(f"{op}: each element of {name} must be positive, got {found}")
    return found


def _pairs(op: str, padding: Any, spatial: Sequence[Any], window: Window) -> Pairs:
    if isinstance(padding, str):
        if padding.upper() not in _PADDINGS:
            checks.check_choice(op, "padding", padding, _PADDINGS)
        reaches = [(size - 1) * gap + 1 for size, gap in zip(window.shape, window.dilation, strict=True)]
        named = lax.padtype_to_pads(spatial, reaches, window.strides, padding.upper())
        return tuple((low, high) for low, high in named)
    pairs_of_ints = "a pair of ints in a sequence" if window.ndim == 1 else f"{window.ndim} pairs of ints"
    expected = f"'SAME', 'VALID', 'SAME_LOWER' or {pairs_of_ints}"
    is_sequence = isinstance(padding, (Sequence, np.ndarray, jax.Array)) and not isinstance(padding, bytes)
    if not is_sequence or checks.is_key(padding) or getattr(padding, "ndim", 1) == 0:
        raise TypeError(f"{op}: padding must be {expected}, got {type(padding).__name__}")
    pairs = tuple(checks.as_ints(op, "each pair of padding", pair) for pair in padding)
    if len(pairs) != window.ndim or any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"{op}: padding must be {expected}, got {padding}")
    return tuple((low, high) for low, high in pairs)
