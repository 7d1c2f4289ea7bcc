"""`jaxgrad.convert.GRUWeights`, the record that every format is read into and written from, and its parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxgrad._src.convert.records import as_records
from jaxgrad._src.gru.api import gru


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class GRUWeights:
    """The weights of one GRU layer, in the convention of `jaxgrad.gru`: gates in the order z, r, n.

    A record is a pytree whose leaves are its arrays: `jax.grad`, optax and checkpoints take it as it is. It has the
    biases that its source has, so that training it and writing it back trains the source's own parameters. Calling
    the record runs `jaxgrad.gru` with it.

    D is the number of directions, 1 or 2, I the input size, and H the hidden size.

    Attributes:
      w: [D, 3H, I], the input weights.
      r: [D, 3H, H], the recurrent weights.
      wb: [D, 3H], the biases of the input product; None for zeros.
      rb: [D, 3H], the biases of the recurrent product; [D, H] if only the gate n has one; None for zeros.
      linear_before_reset: whether the reset gate multiplies the recurrent product instead of the hidden state.
      reverse: whether a single direction takes the steps from the last to the first; False for two directions.
      clip: as in `jaxgrad.gru`.

    Examples:
      >>> from jaxgrad.convert import GRUWeights
      >>> w, r = jnp.ones((1, 15, 3)), jnp.ones((1, 15, 5))
      >>> weights = GRUWeights(w, r, linear_before_reset=True)
      >>> y, y_h = weights(jnp.ones((10, 4, 3)))
      >>> y.shape, y_h.shape
      ((10, 1, 4, 5), (1, 4, 5))
    """

    w: jax.Array
    r: jax.Array
    wb: jax.Array | None = None
    rb: jax.Array | None = None
    linear_before_reset: bool = dataclasses.field(kw_only=True, metadata={"static": True})
    reverse: bool = dataclasses.field(default=False, kw_only=True, metadata={"static": True})
    clip: float | None = dataclasses.field(default=None, kw_only=True, metadata={"static": True})

    @property
    def b(self) -> jax.Array | None:
        """[D, 6H], the biases as `jaxgrad.gru` takes them; None for zeros."""
        if self.wb is None and self.rb is None:
            return None
        zeros = jnp.zeros(self.r.shape[:2], self.r.dtype)
        recurrent = recurrent_bias(self)
        parts = [zeros if self.wb is None else self.wb, zeros if recurrent is None else recurrent]
        return jnp.concatenate(parts, axis=1)

    @property
    def direction(self) -> str:
        """The argument `direction` of `jaxgrad.gru`."""
        if self.w.shape[0] == 2:
            if self.reverse:
                raise ValueError("jaxgrad.convert.GRUWeights: reverse must be False for two directions, got True")
            return "bidirectional"
        return "reverse" if self.reverse else "forward"

    def __call__(
        self,
        x: jax.typing.ArrayLike,
        sequence_lens: jax.typing.ArrayLike | Sequence[int] | None = None,
        initial_h: jax.typing.ArrayLike | None = None,
        *,
        reset: jax.typing.ArrayLike | None = None,
        reset_h: jax.typing.ArrayLike | None = None,
        time_major: bool = True,
        remat_every: int | None = None,
        implementation: str | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """`jaxgrad.gru` with these weights: the same arguments, results and errors."""
        return gru(
            x,
            self.w,
            self.r,
            self.b,
            sequence_lens,
            initial_h,
            reset=reset,
            reset_h=reset_h,
            direction=self.direction,
            linear_before_reset=self.linear_before_reset,
            clip=self.clip,
            time_major=time_major,
            remat_every=remat_every,
            implementation=implementation,
        )


def recurrent_bias(weights: GRUWeights) -> jax.Array | None:
    """[D, 3H], the biases of the recurrent product; None for zeros."""
    if weights.rb is None:
        return None
    missing = weights.r.shape[1] - weights.rb.shape[1]
    return jnp.pad(weights.rb, ((0, 0), (missing, 0))) if missing else weights.rb


def merge_biases(weights: GRUWeights) -> tuple[jax.Array, jax.Array]:
    """`(bias [D, 3H], bias_n [D, H])`: the biases of the input product, and that of the recurrent product of gate n.

    Where a format has one bias for two, it is their sum.
    """
    D, rows, H = weights.r.shape
    zeros = jnp.zeros((D, rows), weights.r.dtype)
    wb = zeros if weights.wb is None else weights.wb
    rb = recurrent_bias(weights)
    if rb is None:
        return wb, zeros[:, :H]
    if not weights.linear_before_reset:
        return _add(wb, rb), zeros[:, :H]
    merged = _add(wb[:, : 2 * H], rb[:, : 2 * H])
    return jnp.concatenate([merged, wb[:, 2 * H :]], axis=1), rb[:, 2 * H :]


def _add(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.where(b == 0, a, a + b)  # -0.0 stays -0.0


def swap_gates(array: jax.Array, axis: int = -1) -> jax.Array:
    """Gates in the order z, r, n from r, z, n, and back."""
    first, second, n = jnp.split(array, 3, axis=axis)
    return jnp.concatenate([second, first, n], axis=axis)


def read_layers(function: str, layers: Sequence[Any], read_cell: Callable[[Any], GRUWeights]) -> tuple[GRUWeights, ...]:
    """The records of layers, each a cell, or a pair of the forward and the backward cell."""
    cells = [layer if isinstance(layer, (tuple, list)) else (layer,) for layer in layers]
    return tuple(stack_directions(function, [read_cell(cell) for cell in directions]) for directions in cells)


def write_layers(
    function: str, weights: Any, form: str, write_cell: Callable[[GRUWeights], Any], *, linear_before_reset: bool
) -> tuple[Any, ...]:
    """For each record a cell, or a pair of the forward and the backward cell. `form` is the name of the cell."""
    written: list[Any] = []
    for layer in as_layers(function, weights):
        check_expressible(function, layer, form, linear_before_reset=linear_before_reset)
        cells = tuple(write_cell(direction) for direction in split_directions(layer))
        written.append(cells if len(cells) == 2 else cells[0])
    return tuple(written)


def stack_directions(function: str, directions: Sequence[GRUWeights]) -> GRUWeights:
    """One record of two directions from two of one direction; the record itself from one."""
    if len(directions) not in (1, 2):
        raise ValueError(
            f"{function}: a layer must be one cell, or a pair of the forward and the backward cell, "
            f"got {len(directions)}"
        )
    if len(directions) == 1:
        return directions[0]
    if directions[0].reverse:
        raise ValueError(f"{function}: the forward direction of a layer must not run in reverse")
    forward, backward = (dataclasses.replace(weights, reverse=False) for weights in directions)
    if _described(forward) != _described(backward):
        raise ValueError(
            f"{function}: the two directions of a layer must have the same sizes, biases and linear_before_reset, "
            f"got {_described(forward)} and {_described(backward)}; each layer is an argument of its own"
        )
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), forward, backward)


def _described(weights: GRUWeights) -> dict[str, Any]:
    arrays = {name: getattr(weights, name) for name in ("w", "r", "wb", "rb")}
    shapes = {name: array.shape[1:] for name, array in arrays.items() if array is not None}
    return {**shapes, "linear_before_reset": weights.linear_before_reset}


def split_directions(weights: GRUWeights) -> tuple[GRUWeights, ...]:
    """One record for each direction."""
    return tuple(jax.tree.map(lambda a: a[d : d + 1], weights) for d in range(weights.w.shape[0]))  # noqa: B023


def as_layers(function: str, weights: Any) -> tuple[GRUWeights, ...]:
    """The records of the layers, from one record or a sequence."""
    return as_records(function, weights, GRUWeights)


def check_expressible(
    function: str, weights: GRUWeights, form: str, *, linear_before_reset: bool | None, reverse: bool = False
) -> None:
    """Raises ValueError if `form`, the layer that the weights are written to, computes something else.

    `linear_before_reset` is the only value that the layer knows, or None if it knows both; `reverse` says whether the
    layer can hold a single direction from the last step to the first.
    """
    if linear_before_reset is not None and weights.linear_before_reset != linear_before_reset:
        raise ValueError(
            f"{function}: weights must have linear_before_reset={linear_before_reset}, "
            f"which {form} computes, got {weights.linear_before_reset}"
        )
    if weights.clip is not None:
        raise ValueError(f"{function}: weights must have clip=None, because {form} does not clip, got {weights.clip}")
    if weights.direction == "reverse" and not reverse:
        raise ValueError(f"{function}: weights must have reverse=False, because {form} has no reverse direction alone")


def check_weights(function: str, name: str, w: jax.Array, r: jax.Array, **biases: jax.Array) -> None:
    """Checks the shapes [3H, I], [3H, H] and, of biases, [3H] of arrays that were read."""
    if w.ndim != 2 or r.ndim != 2 or r.shape[0] != 3 * r.shape[1] or w.shape[0] != r.shape[0]:
        raise ValueError(
            f"{function}: {name} must be a GRU, with 3H rows or columns of weights for H hidden units; "
            f"got input weights of {w.shape} and recurrent weights of {r.shape}, gates first"
        )
    for bias_name, bias in biases.items():
        check_bias(function, f"{bias_name} of {name}", bias, r.shape[0])


def check_bias(function: str, name: str, bias: jax.Array, size: int) -> None:
    if bias.shape != (size,):
        raise ValueError(f"{function}: {name} must have the shape {(size,)}, got {bias.shape}")
