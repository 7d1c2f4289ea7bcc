"""Max pooling calls, their inputs, and references: `jax.lax.reduce_window`, and NumPy for dilated windows too."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from tolerances import input_dtype

import jaxgrad


@dataclasses.dataclass(frozen=True)
class PoolCase:
    """One call of `jaxgrad.max_pool`."""

    batch: tuple[int, ...] = (2,)
    spatial: tuple[int, ...] = (7, 5)
    channels: int = 3
    window: tuple[int, ...] = (3, 2)
    strides: tuple[int, ...] = (2, 1)
    padding: tuple[tuple[int, int], ...] = ((1, 0), (0, 1))
    dilation: tuple[int, ...] = (1, 1)
    channels_last: bool = True
    seed: int = 0

    def replace(self, **changes: Any) -> PoolCase:
        return dataclasses.replace(self, **changes)

    def in_order(self, spatial: tuple[Any, ...], channels: Any, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        """Values for all axes, from those for the spatial axes, the channels and the batch."""
        return (*batch, *spatial, channels) if self.channels_last else (*batch, channels, *spatial)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.in_order(self.spatial, self.channels, self.batch)

    def op(self, **kwargs: Any) -> Callable[..., jax.Array]:
        return partial(
            jaxgrad.max_pool,
            window_shape=self.window,
            strides=self.strides,
            padding=self.padding,
            window_dilation=self.dilation,
            feature_axis=-1 if self.channels_last else -1 - len(self.window),
            **kwargs,
        )

    @property
    def y_shape(self) -> tuple[int, ...]:
        return jax.eval_shape(self.lax, jax.ShapeDtypeStruct(self.shape, "float32")).shape

    def lax(self, x: Any) -> jax.Array:
        """The maxima."""
        return self._reduce_window(x, -np.inf, lax.max)

    def lax_mean(self, x: Any, count_include_pad: bool) -> jax.Array:
        ones = np.ones(self.in_order(self.spatial, 1, (1,) * len(self.batch)), x.dtype)
        counts = np.prod(self.window) if count_include_pad else self._reduce_window(ones, 0, lax.add)
        return self._reduce_window(x, 0, lax.add) / counts

    def _reduce_window(self, x: Any, start: float, operation: Callable[..., Any]) -> jax.Array:
        every = partial(self.in_order, batch=(1,) * len(self.batch), channels=1)
        padding = self.in_order(self.padding, (0, 0), ((0, 0),) * len(self.batch))
        return lax.reduce_window(
            x,
            x.dtype.type(start),
            operation,
            every(self.window),
            every(self.strides),
            padding,
            window_dilation=every(self.dilation),
        )


CASES = [
    PoolCase(),
    PoolCase(channels_last=False),
    PoolCase(batch=(), channels=70),
    PoolCase(batch=(2, 3), channels=1),
    PoolCase(spatial=(41,), window=(4,), strides=(3,), padding=((2, 5),), dilation=(1,), channels=17),
    PoolCase(
        spatial=(5, 4, 6),
        window=(2, 3, 2),
        strides=(1, 2, 3),
        padding=((1, 0), (2, 2), (0, 1)),
        dilation=(1, 1, 1),
        channels=5,
        channels_last=False,
    ),
    PoolCase(batch=(3,), spatial=(64, 61), window=(3, 3), strides=(2, 2), padding=((1, 1), (0, 1)), channels=64),
    PoolCase(batch=(1,), spatial=(9, 8), window=(9, 8), strides=(1, 1), padding=((0, 0), (0, 0)), channels=33),
    PoolCase(
        batch=(40,), spatial=(70, 9), window=(7, 6), strides=(3, 2), padding=((6, 5), (5, 0)), channels_last=False
    ),
    # Few channels: parts of one array in the lanes of vectors, contiguous windows, and windows of all elements.
    PoolCase(batch=(), spatial=(3001,), window=(3,), strides=(2,), padding=((2, 1),), dilation=(1,), channels=1),
    PoolCase(batch=(3,), spatial=(64, 50), window=(2, 2), strides=(2, 2), padding=((0, 0), (0, 0))),
    PoolCase(batch=(2,), spatial=(9, 80), window=(2, 3), strides=(2, 1), padding=((0, 1), (1, 1)), channels=1),
    PoolCase(
        batch=(2, 5), spatial=(9, 8), window=(9, 9), strides=(1, 1), padding=((0, 0), (1, 0)), channels_last=False
    ),
    PoolCase(spatial=(6, 5), window=(1, 1), strides=(3, 2), padding=((0, 0), (0, 0))),
    PoolCase(spatial=(9, 8), window=(1, 2), strides=(1, 2), padding=((0, 0), (0, 0)), channels=33, channels_last=False),
    PoolCase(spatial=(6, 5), window=(2, 2), strides=(4, 3), padding=((5, 6), (7, 0))),  # windows of padding alone
    PoolCase(spatial=(6, 5), window=(8, 2), strides=(1, 1), padding=((0, 0), (0, 0))),  # no window
    PoolCase(batch=(0,)),
    PoolCase(spatial=(0, 5)),
    PoolCase(channels=0),
]


def value_and_gradient(function: Callable[..., jax.Array], x: Any, dy: Any) -> tuple[jax.Array, jax.Array]:
    y, pullback = jax.vjp(function, x)
    return y, pullback(dy)[0]


def random_case(seed: int, dilated: bool = False) -> PoolCase:
    """A small call whose sizes fit nothing."""
    rng = np.random.default_rng(seed)
    ndim = int(rng.integers(1, 4))
    largest = {1: 60, 2: 17, 3: 8}[ndim]

    def draw(low: int, high: int) -> tuple[int, ...]:
        return tuple(int(value) for value in rng.integers(low, high, ndim))

    window = draw(1, 5)
    return PoolCase(
        batch=tuple(int(n) for n in rng.integers(1, 4, rng.integers(0, 3))),
        spatial=draw(1, largest),
        channels=int(rng.choice([1, 2, 3, 8, 15, 16, 17, 33, 64, 70])),
        window=window,
        strides=draw(1, 4),
        padding=tuple((int(rng.integers(0, size)), int(rng.integers(0, size + 1))) for size in window),
        dilation=draw(1, 4) if dilated else (1,) * ndim,
        channels_last=bool(rng.integers(2)),
        seed=seed,
    )


def make_inputs(case: PoolCase, dtype: str, special: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """x, if `special` with ties, NaN, infinities and zeros of both signs; and dy."""
    rng = np.random.default_rng([case.seed, 1])
    x = rng.normal(size=case.shape)
    if special:
        x = np.round(x * 4) / 2
        for value in (np.nan, np.inf, -np.inf, 0.0, -0.0):
            x[rng.random(x.shape) < 0.08] = value
        x[rng.random(x.shape) < 0.2 * rng.integers(2)] = -np.inf  # in half of the cases, many
    x = x.astype(input_dtype(dtype))
    return x, rng.normal(size=case.y_shape).astype(x.dtype)


def numpy_reference(case: PoolCase, x: np.ndarray, dy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The maxima, and the gradient, one window after the other.

    The selected element is the first one, unless one is compared as not less or equal to the best before it.
    """
    every = partial(case.in_order, batch=(0,) * len(case.batch), channels=0)
    pads = case.in_order(case.padding, (0, 0), ((0, 0),) * len(case.batch))
    padded = np.pad(x, pads, constant_values=x.dtype.type(-np.inf))
    dx = np.zeros_like(padded)
    y = np.full_like(dy, -np.inf)
    is_spatial = case.in_order((True,) * len(case.window), False, (False,) * len(case.batch))
    spatial = [axis for axis, here in enumerate(is_spatial) if here]
    strides, windows, dilation = (every(values) for values in (case.strides, case.window, case.dilation))
    for at in itertools.product(*map(range, dy.shape)):
        found = selected = None
        taps = [range(windows[axis]) if axis in spatial else range(1) for axis in range(x.ndim)]
        for tap in itertools.product(*taps):
            index = tuple(
                at[axis] * strides[axis] + tap[axis] * dilation[axis] if axis in spatial else at[axis]
                for axis in range(x.ndim)
            )
            if found is None or not found >= padded[index]:
                found, selected = padded[index], index
            y[at] = np.maximum(y[at], padded[index])
        dx[selected] += dy[at]
    inside = tuple(slice(low, low + size) for (low, _), size in zip(pads, x.shape, strict=True))
    return y, dx[inside]


def assert_maxima(case: PoolCase, x: Any, found: Any, expected: Any) -> None:
    """Compares maxima with those of XLA bit by bit, but NaN and the signs of zeros with x.

    For some shapes, XLA on a CPU loses NaN, and takes the later one of two zeros.
    """
    x, found, expected = map(np.asarray, (x, found, expected))

    def windows_with(condition: np.ndarray) -> np.ndarray:
        return np.asarray(case.lax(condition.astype(np.float32))) == 1

    has_nan, is_zero = windows_with(np.isnan(x)), expected == 0
    np.testing.assert_array_equal(np.isnan(found), has_nan)
    np.testing.assert_array_equal(found == 0, is_zero & ~has_nan)
    has_plus_zero = windows_with((x == 0) & ~np.signbit(x))
    np.testing.assert_array_equal(np.signbit(found)[found == 0], ~has_plus_zero[found == 0])
    others = ~(has_nan | is_zero)
    assert_same_bits(found[others], expected[others])


def assert_same_bits(found: Any, expected: Any) -> None:
    """Compares arrays bit by bit, but for the bits of NaN."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    is_nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), is_nan)
    bits = f"u{found.dtype.itemsize}"
    np.testing.assert_array_equal(np.where(is_nan, 0, found.view(bits)), np.where(is_nan, 0, expected.view(bits)))
