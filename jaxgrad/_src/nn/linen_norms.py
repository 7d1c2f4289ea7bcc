"""`GroupNorm`, `LayerNorm`, `InstanceNorm` and `RMSNorm` of flax linen, on the ops of jaxgrad."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from flax.linen.dtypes import canonicalize_dtype

from jaxgrad._src.nn.batch_norm import as_batch, computes_in
from jaxgrad._src.nn.norms import Norm, find_instance_norm, find_norm


class GroupNorm(nn.GroupNorm):
    """`flax.linen.GroupNorm` on `jaxgrad.group_norm`.

    Constructor, parameters and results are those of `flax.linen.GroupNorm`: checkpoints fit both ways. The variance is
    always computed from deviations; `use_fast_variance` has no effect.

    A call with a mask, `axis_name`, complex numbers or ints, `force_float32_reductions=False`, or with reduced axes
    that are not the last ones runs flax's code.

    Examples:
      >>> from jaxgrad.nn import linen
      >>> norm = linen.GroupNorm(num_groups=4)
      >>> x = jnp.ones((8, 32, 32, 16))
      >>> norm.apply(norm.init(jax.random.key(0), x), x).shape
      (8, 32, 32, 16)
    """

    @nn.compact
    def __call__(self, x: Any, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalizes x, as `flax.linen.GroupNorm`, which describes the arguments."""
        x = as_batch("jaxgrad.nn.linen.GroupNorm", "x", x)
        groups, size, channels = self.num_groups, self.group_size, x.shape[-1]
        if size is not None:
            groups = channels // size if groups is None and size > 0 and channels % size == 0 else None
        axes = [*range(1, x.ndim - 1), -1] if self.reduction_axes is None else self.reduction_axes
        # In flax, the features are among the reduced axes.
        norm = None if groups is None else find_norm(x, axes, -1, num_groups=groups)
        return _run(self, super().__call__, x, mask, norm if norm and -1 in norm.axes else None)


class LayerNorm(nn.LayerNorm):
    """`flax.linen.LayerNorm` on `jaxgrad.layer_norm` and `jaxgrad.group_norm`.

    Constructor, parameters and results are those of `flax.linen.LayerNorm`: checkpoints fit both ways. The variance is
    always computed from deviations; `use_fast_variance` has no effect.

    A call with a mask, `axis_name`, complex numbers or ints, `force_float32_reductions=False`, or with reduced and
    feature axes that are not together the last ones runs flax's code. So does one with several feature axes of which
    only some are reduced, or which are not neighbors and not reduced.

    Examples:
      >>> from jaxgrad.nn import linen
      >>> norm = linen.LayerNorm()
      >>> x = jnp.ones((8, 128, 64))
      >>> norm.apply(norm.init(jax.random.key(0), x), x).shape
      (8, 128, 64)
    """

    @nn.compact
    def __call__(self, x: Any, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalizes x, as `flax.linen.LayerNorm`, which describes the arguments."""
        x = as_batch("jaxgrad.nn.linen.LayerNorm", "x", x)
        return _run(self, super().__call__, x, mask, find_norm(x, self.reduction_axes, self.feature_axes))


class InstanceNorm(nn.InstanceNorm):
    """`flax.linen.InstanceNorm` on `jaxgrad.group_norm`.

    Constructor, parameters and results are those of `flax.linen.InstanceNorm`: checkpoints fit both ways. The variance
    is always computed from deviations; `use_fast_variance` has no effect.

    A call with a mask, `axis_name`, complex numbers or ints, `force_float32_reductions=False`, or several feature axes
    that are not neighbors runs flax's code.

    Examples:
      >>> from jaxgrad.nn import linen
      >>> norm = linen.InstanceNorm()
      >>> x = jnp.ones((8, 32, 32, 16))
      >>> norm.apply(norm.init(jax.random.key(0), x), x).shape
      (8, 32, 32, 16)
    """

    @nn.compact
    def __call__(self, x: Any, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalizes x, as `flax.linen.InstanceNorm`, which describes the arguments."""
        x = as_batch("jaxgrad.nn.linen.InstanceNorm", "x", x)
        return _run(self, super().__call__, x, mask, find_instance_norm(x, self.feature_axes))


class RMSNorm(nn.RMSNorm):
    """`flax.linen.RMSNorm` on `jaxgrad.rms_norm`.

    Constructor, parameters and results are those of `flax.linen.RMSNorm`: checkpoints fit both ways.

    A call with a mask, `axis_name`, complex numbers or ints, `force_float32_reductions=False`, with reduced axes that
    are not the last ones, or with feature axes that are not among the reduced ones runs flax's code.

    Examples:
      >>> from jaxgrad.nn import linen
      >>> norm = linen.RMSNorm()
      >>> x = jnp.ones((8, 128, 64))
      >>> norm.apply(norm.init(jax.random.key(0), x), x).shape
      (8, 128, 64)
    """

    @nn.compact
    def __call__(self, x: Any, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalizes x, as `flax.linen.RMSNorm`, which describes the arguments."""
        x = as_batch("jaxgrad.nn.linen.RMSNorm", "x", x)
        norm = find_norm(x, self.reduction_axes, self.feature_axes, centered=False)
        return _run(self, super().__call__, x, mask, norm)


def _run(layer: Any, own: Callable[..., Any], x: jax.Array, mask: Any, norm: Norm | None) -> Any:
    """The result of a layer. `own` is flax's code."""
    is_usual = mask is None and layer.axis_name is None and layer.force_float32_reductions
    if norm is None or not is_usual or not computes_in(layer.dtype, layer.param_dtype):
        return own(x, mask=mask)
    shape = [x.shape[axis] for axis in norm.feature_axes]
    scale = layer.param("scale", layer.scale_init, shape, layer.param_dtype) if layer.use_scale else None
    has_bias = getattr(layer, "use_bias", False)  # RMSNorm has none
    bias = layer.param("bias", layer.bias_init, shape, layer.param_dtype) if has_bias else None
    dtype = canonicalize_dtype(x, scale, bias, dtype=layer.dtype)
    return norm(x, scale, bias, dtype=dtype, epsilon=layer.epsilon)
