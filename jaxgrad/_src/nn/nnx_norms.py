"""`GroupNorm`, `LayerNorm`, `InstanceNorm` and `RMSNorm` of flax nnx, on the ops of jaxgrad."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from flax.nnx.nn.dtypes import canonicalize_dtype

from jaxgrad._src.nn.batch_norm import as_batch, computes_in
from jaxgrad._src.nn.norms import Norm, find_instance_norm, find_norm


class GroupNorm(nnx.GroupNorm):
    """`flax.nnx.GroupNorm` on `jaxgrad.group_norm`.

    Constructor, variables and results are those of `flax.nnx.GroupNorm`: checkpoints fit both ways. The variance is
    always computed from deviations; `use_fast_variance` has no effect.

    A call with a mask, `axis_name`, complex numbers or ints, or with other reduced axes than all but the first runs
    flax's code.

    Examples:
      >>> import flax.nnx
      >>> from jaxgrad.nn import nnx
      >>> norm = nnx.GroupNorm(16, num_groups=4, rngs=flax.nnx.Rngs(0))
      >>> norm(jnp.ones((8, 32, 32, 16))).shape
      (8, 32, 32, 16)
    """

    @jax.named_scope("jaxgrad.nn.nnx.GroupNorm")
    def __call__(self, x: Any, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalizes x, as `flax.nnx.GroupNorm`, which describes the arguments."""
        x = as_batch("jaxgrad.nn.nnx.GroupNorm", "x", x)
        axes = slice(1, None) if self.reduction_axes is None else self.reduction_axes
        norm = find_norm(x, axes, -1, num_groups=self.num_groups)
        if x.ndim < 2 or (norm is not None and len(norm.axes) != x.ndim - 1):
            norm = None
        return _run(self, super().__call__, x, mask, norm)


class LayerNorm(nnx.LayerNorm):
    """`flax.nnx.LayerNorm` on `jaxgrad.layer_norm` and `jaxgrad.group_norm`.

    Constructor, variables and results are those of `flax.nnx.LayerNorm`: checkpoints fit both ways. The variance is
    always computed from deviations; `use_fast_variance` has no effect.

    A call with a mask, `axis_name`, complex numbers or ints, or with reduced and feature axes that are not together the
    last ones runs flax's code. So does one with several feature axes of which only some are reduced, or which are not
    neighbors and not reduced.

    Examples:
      >>> import flax.nnx
      >>> from jaxgrad.nn import nnx
      >>> norm = nnx.LayerNorm(64, rngs=flax.nnx.Rngs(0))
      >>> norm(jnp.ones((8, 128, 64))).shape
      (8, 128, 64)
    """

    @jax.named_scope("jaxgrad.nn.nnx.LayerNorm")
    def __call__(self, x: Any, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalizes x, as `flax.nnx.LayerNorm`, which describes the arguments."""
        x = as_batch("jaxgrad.nn.nnx.LayerNorm", "x", x)
        return _run(self, super().__call__, x, mask, find_norm(x, self.reduction_axes, self.feature_axes))


class InstanceNorm(nnx.InstanceNorm):
    """`flax.nnx.InstanceNorm` on `jaxgrad.group_norm`.

    Constructor, variables and results are those of `flax.nnx.InstanceNorm`: checkpoints fit both ways. The variance is
    always computed from deviations; `use_fast_variance` has no effect.

    A call with a mask, `axis_name`, complex numbers or ints, or several feature axes that are not neighbors runs flax's
    code.

    Examples:
      >>> import flax.nnx
      >>> from jaxgrad.nn import nnx
      >>> norm = nnx.InstanceNorm(16, rngs=flax.nnx.Rngs(0))
      >>> norm(jnp.ones((8, 32, 32, 16))).shape
      (8, 32, 32, 16)
    """

    @jax.named_scope("jaxgrad.nn.nnx.InstanceNorm")
    def __call__(self, x: Any, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalizes x, as `flax.nnx.InstanceNorm`, which describes the arguments."""
        x = as_batch("jaxgrad.nn.nnx.InstanceNorm", "x", x)
        return _run(self, super().__call__, x, mask, find_instance_norm(x, self.feature_axes))


class RMSNorm(nnx.RMSNorm):
    """`flax.nnx.RMSNorm` on `jaxgrad.rms_norm`.

    Constructor, variables and results are those of `flax.nnx.RMSNorm`: checkpoints fit both ways.

    A call with a mask, `axis_name`, complex numbers or ints, with reduced axes that are not the last ones, or with
    feature axes that are not among the reduced ones runs flax's code.

    Examples:
      >>> import flax.nnx
      >>> from jaxgrad.nn import nnx
      >>> norm = nnx.RMSNorm(64, rngs=flax.nnx.Rngs(0))
      >>> norm(jnp.ones((8, 128, 64))).shape
      (8, 128, 64)
    """

    @jax.named_scope("jaxgrad.nn.nnx.RMSNorm")
    def __call__(self, x: Any, mask: jax.Array | None = None) -> jax.Array:
        """Normalizes x, as `flax.nnx.RMSNorm`, which describes the arguments."""
        x = as_batch("jaxgrad.nn.nnx.RMSNorm", "x", x)
        norm = find_norm(x, self.reduction_axes, self.feature_axes, centered=False)
        return _run(self, super().__call__, x, mask, norm)


def _run(layer: Any, own: Callable[..., Any], x: jax.Array, mask: Any, norm: Norm | None) -> Any:
    """The result of a layer. `own` is flax's code."""
    is_usual = mask is None and layer.axis_name is None
    if norm is None or not is_usual or not computes_in(layer.dtype, layer.param_dtype):
        return own(x, mask=mask)
    has_bias = hasattr(layer, "bias")  # RMSNorm has none
    parameters = [None if p is None else p[...] for p in (layer.scale, *([layer.bias] if has_bias else []))]
    x, *parameters = layer.promote_dtype((x, *parameters), dtype=layer.dtype)
    scale, bias = (*parameters, None)[:2]
    dtype = canonicalize_dtype(x, scale, bias, dtype=layer.dtype)
    return norm(x, scale, bias, dtype=dtype, epsilon=layer.epsilon)
