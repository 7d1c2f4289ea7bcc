"""`jaxgrad.nn.nnx.BatchNorm`: flax nnx's `BatchNorm`, on the ops of jaxgrad."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import canonicalize_dtype

from jaxgrad._src.nn.batch_norm import as_batch, by_batch, by_statistics, computes_in


class BatchNorm(nnx.BatchNorm):
    """`flax.nnx.BatchNorm` on `jaxgrad.batch_norm_training` and `jaxgrad.batch_norm_inference`.

    Constructor, variables and results are those of `flax.nnx.BatchNorm`: checkpoints fit both ways. `axis_name` may
    also name an axis of `jax.vmap`. The variance is always computed from deviations; `use_fast_variance` has no effect.

    A call with a mask, several axes of features, complex numbers, or an x of rank 1 without `axis_name` runs flax's
    code.

    Examples:
      >>> import flax.nnx
      >>> from jaxgrad.nn import nnx
      >>> norm = nnx.BatchNorm(4, momentum=0.9, rngs=flax.nnx.Rngs(0))
      >>> y = norm(jnp.ones((8, 32, 32, 4)))
      >>> norm.mean[...]
      Array([0.1, 0.1, 0.1, 0.1], dtype=float32)
    """

    @jax.named_scope("jaxgrad.nn.nnx.BatchNorm")
    def __call__(self, x: Any, use_running_average: bool | None = None, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalizes x, as `flax.nnx.BatchNorm`, which describes the arguments."""
        x = as_batch("jaxgrad.nn.nnx.BatchNorm", "x", x)
        axes = (self.axis,) if isinstance(self.axis, int) else tuple(self.axis)
        running = self.use_running_average if use_running_average is None else use_running_average
        is_floating = computes_in(x.dtype, self.dtype, self.param_dtype)
        alone = jnp.ndim(x) < 2 and self.axis_name is None
        if mask is not None or len(axes) != 1 or running is None or not is_floating or alone:
            return super().__call__(x, use_running_average, mask=mask)
        scale, bias = (None if p is None else p[...] for p in (self.scale, self.bias))
        x, mean, var, scale, bias = self.promote_dtype(
            (x, self.mean[...], self.var[...], scale, bias), dtype=self.dtype
        )
        settings: dict[str, Any] = {
            "dtype": canonicalize_dtype(x, scale, bias, dtype=self.dtype),
            "feature_axis": axes[0] % x.ndim,
            "epsilon": self.epsilon,
        }
        if running:
            return by_statistics(x, scale, bias, mean, var, **settings)
        y, *statistics = by_batch(
            x, scale, bias, axis_name=self.axis_name, axis_index_groups=self.axis_index_groups, **settings
        )
        # As in flax: variables that are references hold no tracers of differentiation.
        is_reference = any(getattr(variable, "_can_update", False) for variable in (self.mean, self.var))
        for variable, new in zip((self.mean, self.var), statistics, strict=True):
            value = self.momentum * variable[...] + (1 - self.momentum) * new
            variable[...] = jax.lax.stop_gradient(value) if is_reference else value
        return y
