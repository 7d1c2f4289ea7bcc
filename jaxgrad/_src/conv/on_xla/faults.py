"""Convolutions that XLA compiles incorrectly, although `jax.lax` accepts them.

Padding. XLA's f32 and 16-bit convolutions on a CPU, with one or two spatial axes, are wrong where the padding of an
axis is negative at the low end and positive at the high end (jaxlib 0.10.2 and 0.11.2; 0.12.0.1 computes them). JAX
writes such convolutions itself: the input gradient has low padding K - 1 - low, for a window of extent K.

Abort. XLA swaps the operands of a convolution whose window is larger than its input. An axis without padding is left as
it is if lhs_dilation = k and window_strides = k - 1, for a window of k elements without dilation: XLA takes it for a
batch axis. If the input does not have k elements, the swapped convolution is invalid and the process ends with "Check
failed" (jaxlib 0.10.2 to 0.12.0.1, on every platform that swaps operands). The input gradient of a window of 2 with
stride 2 and padding (1, 1) has such an axis.

Crash. XLA's kernel for larger convolutions on a CPU faults where windows cover only padding: low padding of at least
the window leaves such windows if the high padding is negative (jaxlib 0.10.2 to 0.12.0.1).
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxgrad._src.conv.call.geometry import ConvGeometry, Pairs, dilated_size


def is_miscompiled(
    sizes: Sequence[Sequence[int]], factors: Sequence[Sequence[int]], padding: Pairs, platform: str
) -> bool:
    """Whether XLA may miscompile a convolution on a platform.

    Args:
      sizes: the spatial sizes of the input, of the window and of the result.
      factors: lhs_dilation, rhs_dilation and window_strides.
      padding: of each spatial axis.
      platform: that the program is lowered for.
    """
    axes = zip(zip(*sizes, strict=True), zip(*factors, strict=True), padding, strict=True)
    return any(_aborts(*axis) or (platform == "cpu" and _is_padded_wrongly(*axis)) for axis in axes)


def _aborts(sizes: tuple[int, ...], factors: tuple[int, ...], padding: tuple[int, int]) -> bool:
    _, window, _ = sizes
    lhs_dilation, rhs_dilation, stride = factors
    return padding == (0, 0) and rhs_dilation == 1 and window == lhs_dilation == stride + 1


def _is_padded_wrongly(sizes: tuple[int, ...], factors: tuple[int, ...], padding: tuple[int, int]) -> bool:
    (_, window, _), (_, rhs_dilation, _), (low, high) = sizes, factors, padding
    return low < 0 < high or (high < 0 and low >= dilated_size(window, rhs_dilation))


def is_or_derives_miscompiled(sizes: Sequence[Sequence[int]], factors: Sequence[Sequence[int]], padding: Pairs) -> bool:
    """Whether XLA may miscompile a convolution, or one of those that differentiation makes of it.

    In the derivatives the input, the window and the result change places: each may be the window, and its factor the
    dilation. The arguments are those of `is_miscompiled`.
    """
    return any(map(_derives_faulty_axis, zip(*sizes, strict=True), zip(*factors, strict=True), padding))


def _derives_faulty_axis(sizes: tuple[int, ...], factors: tuple[int, ...], padding: tuple[int, int]) -> bool:
    low, _ = padding
    known = [(i, size) for i, size in enumerate(sizes) if isinstance(size, int)]  # the others are symbolic
    for i, size in known:
        others = factors[:i] + factors[i + 1 :]
        if factors[i] == 1 and size > 1 and sorted(others) == [size - 1, size]:
            return True
    windows = [dilated_size(size, factors[i]) for i, size in known if i > 0]
    return low < 0 or any(low >= window for window in windows)


def padding_of_x(geometry: ConvGeometry) -> Pairs:
    """The part of the padding to add to x in a separate operation, so that XLA compiles the input gradient correctly.

    The convolution keeps low padding of at most K - 1, and no axis that XLA takes for a batch axis.
    """
    g, pairs = geometry, []
    axes = zip(g.x_spatial, g.w_spatial, g.y_spatial, g.window_strides, g.rhs_dilation, g.padding, strict=True)
    for x, window, y, stride, dilation, (low, high) in axes:
        extent = dilated_size(window, dilation)
        unread = x + low + high - extent - (y - 1) * stride
        padded = max(0, low - extent + 1)
        aborts = (window, stride, dilation, low - padded, high - unread) == (2, 2, 1, 1, 1)
        pairs.append((low if aborts else padded, 0))
    return tuple(pairs)
