"""A GRU, on jaxgrad and as a `jax.lax.scan`."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxgrad._src.bench.call import Pass, shaped, value, value_and_gradients
from jaxgrad._src.choice.explain import Explanation, explain
from jaxgrad._src.gru.api import gru
from jaxgrad._src.gru.measurable import MANY_STEPS


@dataclasses.dataclass(frozen=True)
class GruCall:
    """A GRU over whole sequences.

    Attributes:
      text, dtype: as in `Call`.
      T, B, I, H: steps, batch, input size and hidden size.
      bidirectional: whether there are two directions.
      linear_before_reset: whether the reset gate multiplies the recurrent product, as in PyTorch and flax.
    """

    text: str
    dtype: str
    T: int
    B: int
    I: int  # noqa: E741
    H: int
    bidirectional: bool
    linear_before_reset: bool

    passes = (
        Pass("forward", partial(value, inputs=5), (0,)),
        Pass("forward + backward", partial(value_and_gradients, inputs=5), (0, 1)),
    )
    total = ("forward + backward",)

    @property
    def one_call_a_program(self) -> bool:
        return self.T >= MANY_STEPS

    @property
    def _settings(self) -> dict[str, Any]:
        direction = "bidirectional" if self.bidirectional else "forward"
        return {"direction": direction, "linear_before_reset": self.linear_before_reset}

    def operands(self) -> list[jax.ShapeDtypeStruct]:
        """x, w, r, b, initial_h, and the cotangents of y and y_h."""
        T, B, I, H, D = self.T, self.B, self.I, self.H, 1 + self.bidirectional  # noqa: E741
        shapes = (T, B, I), (D, 3 * H, I), (D, 3 * H, H), (D, 6 * H), (D, B, H), (T, D, B, H), (D, B, H)
        return shaped(shapes, (self.dtype,) * len(shapes))

    def deviations(self) -> list[float]:
        """With which gates do not saturate."""
        return [1, self.I**-0.5, self.H**-0.5, 0.1, 0.5, 1, 1]

    def on_jaxgrad(self, x: Any, w: Any, r: Any, b: Any, initial_h: Any) -> Any:
        return gru(x, w, r, b, initial_h=initial_h, **self._settings)

    def on_xla(self, x: Any, w: Any, r: Any, b: Any, initial_h: Any) -> Any:
        arrays = (x, w, r, b, initial_h)
        return scan_gru(*arrays, bidirectional=self.bidirectional, linear_before_reset=self.linear_before_reset)

    def explanation(self) -> Explanation:
        x, w, r, b, initial_h, *_ = self.operands()
        return explain(gru, x, w, r, b, initial_h=initial_h, **self._settings)


def scan_gru(
    x: jax.Array,
    w: jax.Array,
    r: jax.Array,
    b: jax.Array,
    initial_h: jax.Array,
    sequence_lens: jax.Array | None = None,
    reset: jax.Array | None = None,
    *,
    bidirectional: bool,
    linear_before_reset: bool,
) -> tuple[jax.Array, jax.Array]:
    """`jaxgrad.gru` on `lax.scan`, with the input product of all steps before the loop."""
    H = r.shape[2]

    def one_direction(d: int) -> tuple[jax.Array, jax.Array]:
        input_bias, recurrent_bias = b[d, : 3 * H], b[d, 3 * H :]
        inputs = x @ w[d].T + input_bias  # [T, B, 3H]

        def step(before: jax.Array, t: Any) -> tuple[jax.Array, jax.Array]:
            inputs_t, reset_t, within_t = t
            h = before if reset_t is None else jnp.where(reset_t[:, None], 0, before)
            in_z, in_r, in_n = jnp.split(inputs_t, 3, axis=-1)
            if linear_before_reset:
                re_z, re_r, re_n = jnp.split(h @ r[d].T + recurrent_bias, 3, axis=-1)
                z, reset = jax.nn.sigmoid(in_z + re_z), jax.nn.sigmoid(in_r + re_r)
                n = jnp.tanh(in_n + reset * re_n)
            else:
                re_z, re_r = jnp.split(h @ r[d, : 2 * H].T + recurrent_bias[: 2 * H], 2, axis=-1)
                z, reset = jax.nn.sigmoid(in_z + re_z), jax.nn.sigmoid(in_r + re_r)
                n = jnp.tanh(in_n + (reset * h) @ r[d, 2 * H :].T + recurrent_bias[2 * H :])
            h = (1 - z) * n + z * h
            if within_t is None:
                return h, h
            return jnp.where(within_t[:, None], h, before), jnp.where(within_t[:, None], h, 0)

        within = None if sequence_lens is None else jnp.arange(x.shape[0])[:, None] < sequence_lens
        last, states = lax.scan(step, initial_h[d], (inputs, reset, within), reverse=d == 1)
        return states, last

    states, lasts = zip(*(one_direction(d) for d in range(1 + bidirectional)), strict=True)
    return jnp.stack(states, 1), jnp.stack(lasts)
