"""`jaxgrad.nn.keras.GRU`: the `GRU` of Keras 3, on `jaxgrad.gru`."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import keras

from jaxgrad._src.convert.functions import computes
from jaxgrad._src.convert.keras_gru import ACTIVATIONS, from_arrays
from jaxgrad._src.gru.api import gru

_NAME = "jaxgrad.nn.keras.GRU"
_logger = logging.getLogger("jaxgrad")

if keras.backend.backend() != "jax":
    raise ImportError(
        f"jaxgrad.nn.keras requires Keras on its JAX backend, got {keras.backend.backend()!r}; "
        "set the environment variable KERAS_BACKEND=jax before Keras is imported"
    )

# The gate z keeps the state where it is 1, as the logistic function of this number is in every dtype. Nothing else that
# enters the gate comes near it. It is a power of two below the largest float16.
_KEEP = 2.0**14


@keras.saving.register_keras_serializable(package="jaxgrad")
class GRU(keras.layers.GRU):
    """`keras.layers.GRU`, with `jaxgrad.gru` in place of a scan over the cell.

    Constructor, weights, configuration and results are those of `keras.layers.GRU`: checkpoints fit both ways.
    `keras.layers.Bidirectional` takes it as it is. Masks may be any bool array [batch, steps]: a masked step keeps the
    state, as in Keras. Keras must run on JAX: `KERAS_BACKEND=jax`.

    With a 16-bit compute dtype, as in the policies `mixed_bfloat16` and `mixed_float16`, the state between the steps is
    float32, and is rounded where it is returned.

    These calls run Keras' implementation, and the logger `jaxgrad` says so at the level INFO, once for each layer
    and reason:

    - `activation` is not tanh, or `recurrent_activation` is not sigmoid;
    - `unroll=True`;
    - `recurrent_dropout` in training;
    - `dropout` in training with `implementation=1`, which drops other inputs for each gate;
    - a mask that does not have the shape [batch, steps].

    `use_cudnn` applies to those calls only.

    Raises:
      ImportError: Keras runs on another backend, where `jaxgrad.nn.keras` is imported.

    Examples:
      >>> import os
      >>> os.environ["KERAS_BACKEND"] = "jax"
      >>> from jaxgrad.nn import keras
      >>> layer = keras.GRU(64, return_sequences=True, dropout=0.1)
      >>> layer(jnp.ones((10, 50, 32))).shape
      (10, 50, 64)
    """

    _logged: frozenset[str] = frozenset()

    def inner_loop(self, sequences: Any, initial_state: Any, mask: Any, training: Any = False) -> Any:
        """Runs all steps, as `keras.layers.GRU`: the last output, all outputs or the last one, and the states."""
        (mask,) = keras.tree.flatten(mask) or (None,)
        reason = self._unsupported(mask, training)
        if reason is not None:
            if reason not in self._logged:
                self._logged |= {reason}
                _logger.info("%s %r runs Keras' own implementation: %s", _NAME, self.name, reason)
            return super().inner_loop(sequences, initial_state, mask, training=training)
        (state,) = keras.tree.flatten(initial_state)
        with jax.named_scope(_NAME):
            if training and self.dropout:
                sequences = sequences * self.cell.get_dropout_mask(sequences[:, 0])[:, None]
            return self._all_steps(sequences, state, None if mask is None else jnp.asarray(mask, bool))

    def _unsupported(self, mask: Any, training: Any) -> str | None:
        """Why the call runs Keras' implementation; None if it runs `jaxgrad.gru`."""
        for name, expected in ACTIVATIONS.items():
            function = getattr(self, name)
            if not computes(function, expected):
                return f"{name}={getattr(function, '__name__', function)}"
        if self.unroll:
            return "unroll=True"
        if training and self.recurrent_dropout:
            return f"recurrent_dropout={self.recurrent_dropout} in training"
        if training and self.dropout and self.cell.implementation == 1:
            return f"dropout={self.dropout} with implementation=1 in training"
        if mask is not None and mask.ndim != 2:
            return f"a mask of shape {mask.shape}"
        return None

    def _all_steps(self, x: jax.Array, state: jax.Array, mask: jax.Array | None) -> Any:
        """Returns the results of `inner_loop`, from x [B, T, I], state [B, H] and mask [B, T]."""
        cell = self.cell
        arrays = [cell.kernel, cell.recurrent_kernel, *([cell.bias] if cell.use_bias else [])]
        arrays = [keras.ops.convert_to_tensor(variable) for variable in arrays]  # in the compute dtype
        dtype = jnp.result_type(x, state, *arrays)
        x, state, *arrays = (array.astype(dtype) for array in (x, state, *arrays))
        weights = from_arrays(arrays, cell.reset_after)
        w = weights.w
        if mask is not None:
            x, w = _with_mask(x, w, mask)
        y, y_h = gru(
            x,
            w,
            weights.r,
            weights.b,
            initial_h=state[:, None],
            direction="reverse" if self.go_backwards else "forward",
            linear_before_reset=cell.reset_after,
            time_major=False,
        )
        outputs, last_state = y[:, :, 0], y_h[:, 0]
        if mask is not None and self.zero_output_for_mask:
            outputs = jnp.where(mask[:, :, None], outputs, 0)
            last = outputs[:, 0 if self.go_backwards else -1]
        else:
            last = last_state
        if self.go_backwards:
            outputs = jnp.flip(outputs, 1)
        return last, outputs if self.return_sequences else last[:, None], [last_state]


def _with_mask(x: jax.Array, w: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x [B, T, I + 1] and w [1, 3H, I + 1] that keep the state in steps where mask [B, T] is false.

    There the added input is 1, and its weight opens the gate z; the other inputs of the step are zero.
    """
    keep = ~mask[:, :, None]
    x = jnp.concatenate([jnp.where(keep, 0, x), keep.astype(x.dtype)], axis=2)
    H = w.shape[1] // 3
    column = jnp.zeros((1, 3 * H, 1), w.dtype).at[:, :H].set(_KEEP)
    return x, jnp.concatenate([w, column], axis=2)
