"""`jaxgrad.nn.linen.BatchNorm`: flax linen's `BatchNorm`, on the ops of jaxgrad."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import canonicalize_dtype

from jaxgrad._src.nn.batch_norm import as_batch, by_batch, by_statistics, computes_in


class BatchNorm(nn.BatchNorm):
    """`flax.linen.BatchNorm` on `jaxgrad.batch_norm_training` and `jaxgrad.batch_norm_inference`.

    Constructor, variables and results are those of `flax.linen.BatchNorm`: checkpoints fit both ways. `axis_name` may
    also name an axis of `jax.vmap`. The variance is always computed from deviations; `use_fast_variance` has no effect.

    A call with a mask, several axes of features, complex numbers, `force_float32_reductions=False`, or an x of rank 1
    without `axis_name` runs flax's code.

    Examples:
      >>> from jaxgrad.nn import linen
      >>> norm = linen.BatchNorm(momentum=0.9)
      >>> x = jnp.ones((8, 32, 32, 4))
      >>> variables = norm.init(jax.random.key(0), x, use_running_average=False)
      >>> y, changed = norm.apply(variables, x, use_running_average=False, mutable=["batch_stats"])
      >>> changed["batch_stats"]["mean"]
      Array([0.1, 0.1, 0.1, 0.1], dtype=float32)
    """

    @nn.compact
    def __call__(self, x: Any, use_running_average: bool | None = None, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalizes x, as `flax.linen.BatchNorm`, which describes the arguments."""
        x = as_batch("jaxgrad.nn.linen.BatchNorm", "x", x)
        axes = (self.axis,) if isinstance(self.axis, int) else tuple(self.axis)
        axis_name = None if self.is_initializing() else self.axis_name
        is_floating = computes_in(x.dtype, self.dtype, self.param_dtype)
        alone = jnp.ndim(x) < 2 and axis_name is None
        if mask is not None or len(axes) != 1 or not self.force_float32_reductions or not is_floating or alone:
            return super().__call__(x, use_running_average, mask=mask)
        use_running_average = nn.merge_param("use_running_average", self.use_running_average, use_running_average)
        axis = axes[0] % jnp.ndim(x)
        shape = (jnp.shape(x)[axis],)
        mean = self.variable("batch_stats", "mean", lambda s: jnp.zeros(s, jnp.float32), shape)
        var = self.variable("batch_stats", "var", lambda s: jnp.ones(s, jnp.float32), shape)
        scale = self.param("scale", self.scale_init, shape, self.param_dtype) if self.use_scale else None
        bias = self.param("bias", self.bias_init, shape, self.param_dtype) if self.use_bias else None
        dtype = canonicalize_dtype(x, scale, bias, dtype=self.dtype)
        settings: dict[str, Any] = {"dtype": dtype, "feature_axis": axis, "epsilon": self.epsilon}
        if use_running_average:
            return by_statistics(x, scale, bias, mean.value, var.value, **settings)
        groups = None if axis_name is None else self.axis_index_groups
        y, *statistics = by_batch(x, scale, bias, axis_name=axis_name, axis_index_groups=groups, **settings)
        if not self.is_initializing():
            for running, new in zip((mean, var), statistics, strict=True):
                running.value = self.momentum * running.value + (1 - self.momentum) * new
        return y
