"""`jaxgrad.convert.ConvWeights` and `ConvTransposeWeights`, the records of convolutions, and their parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrad._src.conv.api import conv_general_dilated
from jaxgrad._src.conv.call.geometry import dilated_size
from jaxgrad._src.conv.transpose import conv_transpose
from jaxgrad._src.convert.records import static_field
from jaxgrad._src.core.activations import Activation

Padding = str | tuple[tuple[int, int], ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ConvWeights:
    """The weights of one convolution, and how it is applied.

    A record is a pytree whose leaves are its arrays: `jax.grad`, optax and checkpoints take it as it is. Calling the
    record runs `jaxgrad.conv_general_dilated` with it. With n spatial dimensions, I input features, O output features
    and G groups:

    Attributes:
      kernel: [*window, I/G, O].
      bias: [O], or None for no bias.
      strides: n ints.
      padding: "SAME", "SAME_LOWER" or "VALID", or n pairs (low, high).
      dilation: n ints, the dilation of the window.
      groups: G.
      channels_last: whether the features of x and of the result are the last axis, or the axis after the batch.

    Examples:
      >>> from jaxgrad.convert import ConvWeights
      >>> settings = {"strides": (2, 2), "padding": "SAME", "dilation": (1, 1), "groups": 1, "channels_last": True}
      >>> weights = ConvWeights(jnp.ones((3, 3, 4, 6)), jnp.zeros(6), **settings)
      >>> weights(jnp.ones((8, 32, 32, 4)), activation="relu").shape
      (8, 16, 16, 6)
    """

    kernel: jax.Array
    bias: jax.Array | None
    strides: tuple[int, ...] = static_field()
    padding: str | tuple[tuple[int, int], ...] = static_field()
    dilation: tuple[int, ...] = static_field()
    groups: int = static_field()
    channels_last: bool = static_field()

    def __call__(
        self,
        x: jax.typing.ArrayLike,
        *,
        activation: Activation = None,
        precision: Any = None,
        implementation: str | None = None,
    ) -> jax.Array:
        """The convolution of a batch x, or of one example without the axis of the batch.

        The arguments and the errors are those of `jaxgrad.conv_general_dilated`.
        """
        settings = {"activation": activation, "precision": precision, "implementation": implementation}
        return _apply(conv_general_dilated, self, x, **settings)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ConvTransposeWeights:
    """The weights of one transposed convolution, and how it is applied.

    The kernel is that of the convolution that is transposed, as in PyTorch, Keras and ONNX. As `ConvWeights`, a record
    is a pytree, and calling it runs `jaxgrad.conv_transpose` with it. With n spatial dimensions, I input features, O
    output features and G groups:

    Attributes:
      kernel: [*window, O/G, I].
      bias: [O], or None for no bias.
      strides: n ints, the factors by which the spatial sizes grow.
      padding: n pairs (low, high), the padding of the convolution that is transposed: they shorten the result.
      output_padding: n ints, the positions that are added to the result at the high end.
      dilation: n ints, the dilation of the window.
      groups: G.
      channels_last: whether the features of x and of the result are the last axis, or the axis after the batch.

    Examples:
      >>> from jaxgrad.convert import ConvTransposeWeights
      >>> settings = {"padding": ((1, 1), (1, 1)), "dilation": (1, 1), "groups": 1, "channels_last": False}
      >>> weights = ConvTransposeWeights(
      ...     jnp.ones((4, 4, 6, 8)), None, strides=(2, 2), output_padding=(0, 0), **settings
      ... )
      >>> weights(jnp.ones((8, 8, 16, 16))).shape
      (8, 6, 32, 32)
    """

    kernel: jax.Array
    bias: jax.Array | None
    strides: tuple[int, ...] = static_field()
    padding: tuple[tuple[int, int], ...] = static_field()
    output_padding: tuple[int, ...] = static_field()
    dilation: tuple[int, ...] = static_field()
    groups: int = static_field()
    channels_last: bool = static_field()

    def __call__(
        self,
        x: jax.typing.ArrayLike,
        *,
        activation: Activation = None,
        precision: Any = None,
        implementation: str | None = None,
    ) -> jax.Array:
        """The transposed convolution of a batch x, or of one example without the axis of the batch.

        The arguments and the errors are those of `jaxgrad.conv_transpose`.
        """
        own = {"transpose_kernel": True, "use_consistent_padding": True, "output_padding": self.output_padding}
        settings = {"activation": activation, "precision": precision, "implementation": implementation}
        return _apply(conv_transpose, self, x, **own, **settings)


def _apply(
    op: Callable[..., jax.Array], weights: ConvWeights | ConvTransposeWeights, x: Any, **settings: Any
) -> jax.Array:
    """The op with the arrays and the attributes that both records have, of a batch or of one example."""
    x = x if isinstance(x, jax.Array) else np.asarray(x)
    is_example = x.ndim == weights.kernel.ndim - 1
    y = op(
        x[None] if is_example else x,
        weights.kernel,
        weights.strides,
        weights.padding,
        rhs_dilation=weights.dilation,
        dimension_numbers=_layout(len(weights.strides), weights.channels_last),
        feature_group_count=weights.groups,
        bias=weights.bias,
        **settings,
    )
    return y[0] if is_example else y


def _layout(n: int, channels_last: bool) -> tuple[str, str, str]:
    window = "DHW"[-n:]
    lhs = f"N{window}C" if channels_last else f"NC{window}"
    return lhs, f"{window}IO", lhs


# Kernels of formats that put the features first: [a, b, *window] and [*window, b, a].


def features_last(kernel: jax.Array) -> jax.Array:
    """[*window, b, a] from [a, b, *window]."""
    return kernel.transpose((*range(2, kernel.ndim), 1, 0))


def features_first(kernel: jax.Array) -> jax.Array:
    """[a, b, *window] from [*window, b, a]: the inverse of `features_last`."""
    n = kernel.ndim - 2
    return kernel.transpose((n + 1, n, *range(n)))


# Kernels of transposed convolutions that are written as convolutions of the dilated input, as in jax.lax and equinox.


def reverse_window(kernel: jax.Array) -> jax.Array:
    """The kernel [*window, a, b] with the window reversed; its own inverse."""
    return jnp.flip(kernel, range(kernel.ndim - 2))


def swap_groups(kernel: jax.Array, groups: int) -> jax.Array:
    """[*window, b, G*a] from [*window, a, G*b]: swaps the features of each group; its own inverse."""
    *window, a, b = kernel.shape
    return jnp.swapaxes(kernel.reshape(*window, a, groups, b // groups), -3, -1).reshape(
        *window, b // groups, groups * a
    )


def repeat(function: str, name: str, value: Any, n: int, least: int = 1) -> tuple[int, ...]:
    """n ints of at least `least` from an int, or from a sequence of one or n ints; None stands for ones."""
    value = 1 if value is None else value
    values = _as_sequence(value, n)
    if len(values) != n or not all(map(_is_int, values)):
        raise ValueError(f"{function}: {name} must be an int or {n} ints, got {value!r}")
    _check_range(function, name, value, values, least)
    return tuple(map(int, values))


def padding_pairs(function: str, value: Any, n: int, least: int = -(1 << 63)) -> tuple[tuple[int, int], ...]:
    """n pairs from an int, or from a sequence of n ints or pairs."""
    pairs = [_as_sequence(v, 2, repeat=False) for v in _as_sequence(value, n)]
    if len(pairs) != n or not all(len(pair) == 2 and all(map(_is_int, pair)) for pair in pairs):
        raise ValueError(f"{function}: padding must be an int, or {n} ints or pairs (low, high), got {value!r}")
    _check_range(function, "padding", value, [size for pair in pairs for size in pair], least)
    return tuple((int(low), int(high)) for low, high in pairs)


def _as_sequence(value: Any, n: int, *, repeat: bool = True) -> tuple[Any, ...]:
    """n times an int, or the elements of a sequence, of which a single one is repeated; empty for other values."""
    if _is_int(value):
        return (value,) * n
    is_sequence = isinstance(value, Sequence) or (isinstance(value, np.ndarray) and value.ndim > 0)
    values = tuple(value) if is_sequence and not isinstance(value, (str, bytes, bytearray, memoryview)) else ()
    return values * n if repeat and len(values) == 1 else values


def _is_int(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _check_range(function: str, name: str, value: Any, sizes: Sequence[int], least: int) -> None:
    """Checks the sizes of an argument that was given as `value`."""
    if min(sizes) < least:
        raise ValueError(f"{function}: {name} must be at least {least}, got {value!r}")
    if max(sizes) >= 1 << 63:
        raise ValueError(f"{function}: {name} must fit into 64 bits, got {value!r}")


def window_extents(kernel: jax.Array, dilation: Sequence[int]) -> list[int]:
    """The sizes of the dilated window of a kernel [*window, a, b]."""
    return [dilated_size(size, d) for size, d in zip(kernel.shape[:-2], dilation, strict=True)]


def causal_padding(kernel: jax.Array, dilation: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The padding of a convolution over time whose result at a step depends on no later step."""
    (extent,) = window_extents(kernel, dilation)
    return ((extent - 1, 0),)


def dilated_padding(
    kernel: jax.Array, dilation: Sequence[int], padding: Sequence[tuple[int, int]]
) -> tuple[tuple[int, int], ...]:
    """The padding of a transposed convolution from that of its dilated input; its own inverse."""
    extents = window_extents(kernel, dilation)
    return tuple((extent - 1 - low, extent - 1 - high) for extent, (low, high) in zip(extents, padding, strict=True))


def check_arrays(function: str, kernel: jax.Array, bias: jax.Array | None, groups: int, *, transposed: bool) -> None:
    """Checks the arrays of a record that is read."""
    rank = kernel.ndim - 2
    if rank not in (1, 2, 3):
        raise ValueError(f"{function}: the kernel must have 1, 2 or 3 spatial dimensions, got {rank}")
    if not _is_int(groups):
        raise TypeError(f"{function}: groups must be an int, got {type(groups).__name__}")
    if groups < 1 or kernel.shape[-1] % groups:
        side = "input" if transposed else "output"
        raise ValueError(f"{function}: groups must divide the {kernel.shape[-1]} {side} features, got {groups}")
    features = kernel.shape[-2] * groups if transposed else kernel.shape[-1]
    if bias is not None and bias.shape != (features,):
        raise ValueError(f"{function}: the bias must have the shape {(features,)}, got {bias.shape}")
