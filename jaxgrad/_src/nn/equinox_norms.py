"""`GroupNorm`, `LayerNorm` and `RMSNorm` of equinox, on the ops of jaxgrad."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from jaxgrad._src.nn.batch_norm import as_batch
from jaxgrad._src.nn.norms import Norm, find_norm
from jaxgrad._src.nn.rows import call_with_rows


class GroupNorm(eqx.nn.GroupNorm):
    """`equinox.nn.GroupNorm` on `jaxgrad.group_norm`.

    Constructor, arrays and results are those of `equinox.nn.GroupNorm`: checkpoints fit both ways. Under `jax.vmap`,
    the layer is one call for the whole batch. A call with complex numbers or ints runs equinox's code.

    Examples:
      >>> from jaxgrad.nn import equinox
      >>> jax.vmap(equinox.GroupNorm(4, 16))(jnp.ones((8, 16, 32, 32))).shape
      (8, 16, 32, 32)
    """

    def __call__(self, x: jax.Array, state: eqx.nn.State | None = None, *, key: Any = None) -> Any:
        """Normalizes x, of shape [C, ...], as `equinox.nn.GroupNorm`, which describes the arguments."""
        x = as_batch("jaxgrad.nn.equinox.GroupNorm", "x", x)
        return _run(self, super().__call__, x, state, find_norm(x, slice(None), 0, num_groups=self.groups))


class LayerNorm(eqx.nn.LayerNorm):
    """`equinox.nn.LayerNorm` on `jaxgrad.layer_norm`.

    Constructor, arrays and results are those of `equinox.nn.LayerNorm`: checkpoints fit both ways. Under `jax.vmap`,
    the layer is one call for the whole batch. A call with complex numbers or ints runs equinox's code.

    Examples:
      >>> from jaxgrad.nn import equinox
      >>> jax.vmap(equinox.LayerNorm(64))(jnp.ones((128, 64))).shape
      (128, 64)
    """

    def __call__(self, x: jax.Array, state: eqx.nn.State | None = None, *, key: Any = None) -> Any:
        """Normalizes x, of the shape of the layer, as `equinox.nn.LayerNorm`, which describes the arguments."""
        x = as_batch("jaxgrad.nn.equinox.LayerNorm", "x", x)
        norm = find_norm(x, slice(None), slice(None)) if x.shape == self.shape else None
        return _run(self, super().__call__, x, state, norm)


class RMSNorm(eqx.nn.RMSNorm):
    """`equinox.nn.RMSNorm` on `jaxgrad.rms_norm`.

    Constructor, arrays and results are those of `equinox.nn.RMSNorm`: checkpoints fit both ways. Under `jax.vmap`, the
    layer is one call for the whole batch. A call with complex numbers or ints runs equinox's code.

    Examples:
      >>> from jaxgrad.nn import equinox
      >>> jax.vmap(equinox.RMSNorm(64))(jnp.ones((128, 64))).shape
      (128, 64)
    """

    def __call__(self, x: jax.Array, state: eqx.nn.State | None = None, *, key: Any = None) -> Any:
        """Normalizes x, of the shape of the layer, as `equinox.nn.RMSNorm`, which describes the arguments."""
        x = as_batch("jaxgrad.nn.equinox.RMSNorm", "x", x)
        norm = find_norm(x, slice(None), slice(None), centered=False) if x.shape == self.shape else None
        return _run(self, super().__call__, x, state, norm)


@dataclasses.dataclass(frozen=True)
class _Examples:
    """A layer as a function of its weight and bias, and of examples x [N, ...]."""

    norm: Norm
    epsilon: float

    def __call__(self, parameters: tuple[jax.Array | None, jax.Array | None], x: jax.Array) -> list[jax.Array]:
        return [self.norm(x, *parameters, dtype=x.dtype, epsilon=self.epsilon)]


def _run(layer: Any, own: Callable[..., Any], x: jax.Array, state: eqx.nn.State | None, norm: Norm | None) -> Any:
    """The result of a layer, with the state if there is one. `own` is equinox's code."""
    if norm is None:
        return own(x) if state is None else own(x, state)
    with jax.named_scope(f"jaxgrad.nn.equinox.{type(layer).__name__}"):
        examples, parameters = _Examples(norm, layer.eps), (layer.weight, layer.bias)
        y = call_with_rows(examples, parameters, x[None], in_axes=(0,), out_axes=(0,))[0][0]
    return y if state is None else (y, state)
