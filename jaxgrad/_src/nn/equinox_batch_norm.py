"""`jaxgrad.nn.equinox.BatchNorm`: equinox's `BatchNorm`, on the ops of jaxgrad."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from jaxgrad._src.nn.batch_norm import as_batch, by_batch, by_statistics


class BatchNorm(eqx.nn.BatchNorm):
    """`equinox.nn.BatchNorm` on `jaxgrad.batch_norm_training` and `jaxgrad.batch_norm_inference`.

    Constructor, arrays, state and results are those of `equinox.nn.BatchNorm` in both modes: checkpoints fit both ways.
    Under `jax.vmap(..., axis_name=...)`, the layer is one call for the whole batch. `mode="ema"` also runs the
    normalization by the running statistics on the kernels.

    Without an enclosing `vmap` with this `axis_name`, training raises ValueError, where equinox raises NameError.

    A call with complex numbers runs equinox's code.

    Examples:
      >>> import equinox as eqx
      >>> from jaxgrad.nn import equinox
      >>> norm, state = eqx.nn.make_with_state(equinox.BatchNorm)(4, axis_name="batch", mode="batch")
      >>> batched = jax.vmap(norm, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
      >>> y, state = batched(jnp.ones((8, 4, 32, 32)), state)
      >>> y.shape
      (8, 4, 32, 32)
    """

    def __call__(
        self, x: jax.Array, state: eqx.nn.State, *, key: Any = None, inference: bool | None = None
    ) -> tuple[jax.Array, eqx.nn.State]:
        """Normalizes x, of shape [C, ...], as `equinox.nn.BatchNorm`, which describes the arguments."""
        del key
        x = as_batch("jaxgrad.nn.equinox.BatchNorm", "x", x)
        inference = self.inference if inference is None else inference
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            return super().__call__(x, state, inference=inference)
        with jax.named_scope("jaxgrad.nn.equinox.BatchNorm"):
            return (self._ema if self.mode == "ema" else self._batch)(x, state, inference)

    def _batch(self, x: jax.Array, state: eqx.nn.State, inference: bool) -> tuple[jax.Array, eqx.nn.State]:
        index: Any = self.batch_state_index
        counter_index: Any = self.batch_counter
        counter, sums = state.get(counter_index), state.get(index)
        if inference:
            correction = jnp.where(counter == 0, 1, 1 - self.momentum**counter)
            return self._by_statistics(x, *(total / correction for total in sums)), state
        y, *statistics = self._by_batch(x)
        m = self.momentum
        sums = tuple(a * m + b.astype(a.dtype) * (1 - m) for a, b in zip(sums, statistics, strict=True))
        return y, state.set(counter_index, counter + 1).set(index, sums)

    def _ema(self, x: jax.Array, state: eqx.nn.State, inference: bool) -> tuple[jax.Array, eqx.nn.State]:
        index: Any = self.ema_state_index
        first_index: Any = self.ema_first_time_index
        running = state.get(index)
        if not inference:
            first_time = state.get(first_index)
            _, *statistics = self._by_batch(x)
            m = self.momentum
            running = tuple(
                lax.select(first_time, new.astype(old.dtype), (1 - m) * new.astype(old.dtype) + m * old)
                for old, new in zip(running, statistics, strict=True)
            )
            state = state.set(first_index, jnp.array(False)).set(index, running)
        return self._by_statistics(x, *running), state

    def _by_batch(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        dtype = jnp.result_type(x, *(a for a in (self.weight, self.bias) if a is not None))
        return by_batch(
            x, self.weight, self.bias, dtype=dtype, feature_axis=0, epsilon=self.eps, axis_name=self.axis_name
        )

    def _by_statistics(self, x: jax.Array, mean: jax.Array, var: jax.Array) -> jax.Array:
        dtype = jnp.result_type(x, mean, *(a for a in (self.weight, self.bias) if a is not None))
        return by_statistics(x, self.weight, self.bias, mean, var, dtype=dtype, feature_axis=0, epsilon=self.eps)
