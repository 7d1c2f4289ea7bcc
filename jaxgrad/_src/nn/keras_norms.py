"""`BatchNormalization`, `GroupNormalization`, `LayerNormalization` and `RMSNormalization` of Keras 3, on the ops of
jaxgrad."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras

from jaxgrad._src.nn.batch_norm import as_batch, by_batch, by_statistics
from jaxgrad._src.nn.norms import Norm, find_norm

_register = keras.saving.register_keras_serializable(package="jaxgrad")


@_register
class BatchNormalization(keras.layers.BatchNormalization):
    """`keras.layers.BatchNormalization` on `jaxgrad.batch_norm_training` and `jaxgrad.batch_norm_inference`.

    Constructor, weights, configuration and results are those of `keras.layers.BatchNormalization`: checkpoints fit both
    ways. A call with a mask, `renorm=True`, inputs of rank 1, or complex numbers or ints runs Keras' code.

    Examples:
      >>> import os
      >>> os.environ["KERAS_BACKEND"] = "jax"
      >>> from jaxgrad.nn import keras
      >>> layer = keras.BatchNormalization(momentum=0.9)
      >>> layer(jnp.ones((8, 32, 32, 4)), training=True).shape
      (8, 32, 32, 4)
    """

    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        """Normalizes the inputs, as `keras.layers.BatchNormalization`."""
        x = as_batch("jaxgrad.nn.keras.BatchNormalization", "inputs", inputs)
        is_floating = jnp.issubdtype(x.dtype, jnp.floating)
        if mask is not None or getattr(self, "renorm", False) or x.ndim < 2 or not is_floating:
            return super().call(inputs, training=training, mask=mask)
        scale, bias = _values(self.gamma, self.beta)
        settings: dict[str, Any] = {
            "dtype": self.compute_dtype,
            "feature_axis": self.axis % x.ndim,
            "epsilon": self.epsilon,
        }
        with jax.named_scope("jaxgrad.nn.keras.BatchNormalization"):
            if not (training and self.trainable):
                running = _values(self.moving_mean, self.moving_variance)
                return by_statistics(x, scale, bias, *running, **settings)
            y, *statistics = by_batch(x, scale, bias, **settings)
        for variable, new in zip((self.moving_mean, self.moving_variance), statistics, strict=True):
            variable.assign(variable * self.momentum + new * (1.0 - self.momentum))
        return y


@_register
class GroupNormalization(keras.layers.GroupNormalization):
    """`keras.layers.GroupNormalization` on `jaxgrad.group_norm`.

    Constructor, weights, configuration and results are those of `keras.layers.GroupNormalization`: checkpoints fit both
    ways. A call with complex numbers or ints runs Keras' code.

    Examples:
      >>> import os
      >>> os.environ["KERAS_BACKEND"] = "jax"
      >>> from jaxgrad.nn import keras
      >>> keras.GroupNormalization(groups=4)(jnp.ones((8, 32, 32, 16))).shape
      (8, 32, 32, 16)
    """

    def call(self, inputs: Any) -> Any:
        """Normalizes the inputs, as `keras.layers.GroupNormalization`."""
        x = as_batch("jaxgrad.nn.keras.GroupNormalization", "inputs", inputs)
        norm = find_norm(x, slice(1, None), self.axis, num_groups=self.groups) if self.axis % x.ndim else None
        if norm is None:
            return super().call(inputs)
        return _run(self, x, norm, self.gamma, self.beta).astype(self.compute_dtype)


@_register
class LayerNormalization(keras.layers.LayerNormalization):
    """`keras.layers.LayerNormalization` on `jaxgrad.layer_norm`.

    Constructor, weights, configuration and results are those of `keras.layers.LayerNormalization`: checkpoints fit both
    ways. A call with an `axis` other than the last axes, in their order, `rms_scaling=True`, or complex numbers or ints
    runs Keras' code.

    Examples:
      >>> import os
      >>> os.environ["KERAS_BACKEND"] = "jax"
      >>> from jaxgrad.nn import keras
      >>> keras.LayerNormalization()(jnp.ones((8, 128, 64))).shape
      (8, 128, 64)
    """

    def call(self, inputs: Any) -> Any:
        """Normalizes the inputs, as `keras.layers.LayerNormalization`."""
        x = as_batch("jaxgrad.nn.keras.LayerNormalization", "inputs", inputs)
        norm = None if self.rms_scaling else _find_rows(x, self.axis)
        if norm is None:
            return super().call(inputs)
        return _run(self, x, norm, self.gamma, self.beta).astype(self.compute_dtype)


__all__ = ["BatchNormalization", "GroupNormalization", "LayerNormalization"]

if hasattr(keras.layers, "RMSNormalization"):  # Keras 3.9 or newer

    @_register
    class RMSNormalization(keras.layers.RMSNormalization):
        """`keras.layers.RMSNormalization` on `jaxgrad.rms_norm`, where Keras has this layer.

        Constructor, weights, configuration and results are those of `keras.layers.RMSNormalization`: checkpoints fit
        both ways. A call with an `axis` other than the last axes, in their order, or complex numbers or ints runs
        Keras' code.

        Examples:
          >>> import os
          >>> os.environ["KERAS_BACKEND"] = "jax"
          >>> from jaxgrad.nn import keras
          >>> keras.RMSNormalization()(jnp.ones((8, 128, 64))).shape
          (8, 128, 64)
        """

        def call(self, inputs: Any) -> Any:
            """Normalizes the inputs, as `keras.layers.RMSNormalization`."""
            x = as_batch("jaxgrad.nn.keras.RMSNormalization", "inputs", inputs)
            norm = _find_rows(x, self.axis, centered=False)
            return super().call(inputs) if norm is None else _run(self, x, norm, self.scale, None)

    __all__ += ["RMSNormalization"]


def _find_rows(x: jax.Array, axes: list[int], **settings: Any) -> Norm | None:
    """The op for a list of axes that are in the order of x, as Keras' own parameters are only then."""
    positive = [axis % x.ndim for axis in axes]
    return find_norm(x, positive, positive, **settings) if positive == sorted(set(positive)) else None


def _values(*variables: Any) -> tuple[Any, ...]:
    return tuple(None if variable is None else keras.ops.convert_to_tensor(variable) for variable in variables)


def _run(layer: Any, x: jax.Array, norm: Norm, *parameters: Any) -> jax.Array:
    scale, bias = _values(*parameters)
    with jax.named_scope(f"jaxgrad.nn.keras.{type(layer).__name__}"):
        return norm(x, scale, bias, dtype=x.dtype, epsilon=layer.epsilon)
