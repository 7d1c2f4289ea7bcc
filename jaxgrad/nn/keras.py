"""Layers of Keras 3 on the ops of jaxgrad."""

from jaxgrad._src.core.optional import require as _require

_require("keras", extra="keras", module="jaxgrad.nn.keras")

from jaxgrad._src.nn.keras_gru import GRU as GRU  # noqa: E402

__all__ = ["GRU"]
