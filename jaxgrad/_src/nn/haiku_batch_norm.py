"""`jaxgrad.nn.haiku.BatchNorm`: Haiku's `BatchNorm`, on the ops of jaxgrad."""

from __future__ import annotations

import haiku as hk
import jax
import jax.numpy as jnp

from jaxgrad._src.nn.batch_norm import as_batch, by_batch, by_statistics


class BatchNorm(hk.BatchNorm):
    """`haiku.BatchNorm` on `jaxgrad.batch_norm_training` and `jaxgrad.batch_norm_inference`.

    Constructor, parameters, state and results are those of `haiku.BatchNorm`: checkpoints fit both ways.
    `cross_replica_axis` may also name an axis of `jax.vmap`. The variance is computed from deviations.

    A call with `axis`, a `scale` or `offset`, complex numbers, or inputs of rank 1 without `cross_replica_axis` runs
    Haiku's code.

    Examples:
      >>> import haiku as hk
      >>> from jaxgrad.nn import haiku
      >>> module = hk.transform_with_state(lambda x: haiku.BatchNorm(True, True, decay_rate=0.9)(x, is_training=True))
      >>> x = jnp.ones((8, 32, 32, 4))
      >>> params, state = module.init(jax.random.key(0), x)
      >>> y, state = module.apply(params, state, None, x)
      >>> y.shape
      (8, 32, 32, 4)
    """

    def __call__(
        self,
        inputs: jax.Array,
        is_training: bool,
        test_local_stats: bool = False,
        scale: jax.Array | None = None,
        offset: jax.Array | None = None,
    ) -> jax.Array:
        """Normalizes the inputs, as `haiku.BatchNorm`, which describes the arguments."""
        inputs = as_batch("jaxgrad.nn.haiku.BatchNorm", "inputs", inputs)
        is_floating = jnp.issubdtype(inputs.dtype, jnp.floating)
        alone = inputs.ndim < 2 and not self.cross_replica_axis
        if self.axis is not None or scale is not None or offset is not None or not is_floating or alone:
            return super().__call__(inputs, is_training, test_local_stats, scale, offset)
        axis, dtype = self.channel_index % inputs.ndim, inputs.dtype
        shape = [1] * inputs.ndim
        shape[axis] = inputs.shape[axis]
        if self.create_scale:
            scale = hk.get_parameter("scale", shape, dtype, self.scale_init).reshape(-1)
        if self.create_offset:
            offset = hk.get_parameter("offset", shape, dtype, self.offset_init).reshape(-1)
        result = jnp.result_type(dtype, *(a for a in (scale, offset) if a is not None))
        if not (is_training or test_local_stats):
            mean, var = (ema.average.astype(dtype).reshape(-1) for ema in (self.mean_ema, self.var_ema))
            return by_statistics(inputs, scale, offset, mean, var, dtype=result, feature_axis=axis, epsilon=self.eps)
        y, mean, var = by_batch(
            inputs,
            scale,
            offset,
            dtype=result,
            feature_axis=axis,
            epsilon=self.eps,
            axis_name=self.cross_replica_axis or None,
            axis_index_groups=self.cross_replica_axis_index_groups,
        )
        if is_training:
            self.mean_ema(mean.astype(dtype).reshape(shape))
            self.var_ema(var.astype(dtype).reshape(shape))
        return y
