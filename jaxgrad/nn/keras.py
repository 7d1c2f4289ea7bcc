"""Layers of Keras 3 on the ops of jaxgrad."""

from jaxgrad._src.core.optional import require as _require

_require("keras", extra="keras", module="jaxgrad.nn.keras")

from jaxgrad._src.nn import keras_norms as _norms  # noqa: E402
from jaxgrad._src.nn.keras_gru import GRU as GRU  # noqa: E402
from jaxgrad._src.nn.keras_norms import BatchNormalization as BatchNormalization  # noqa: E402
from jaxgrad._src.nn.keras_norms import GroupNormalization as GroupNormalization  # noqa: E402
from jaxgrad._src.nn.keras_norms import LayerNormalization as LayerNormalization  # noqa: E402

__all__ = ["GRU", "BatchNormalization", "GroupNormalization", "LayerNormalization"]

if hasattr(_norms, "RMSNormalization"):  # where Keras has it
    from jaxgrad._src.nn.keras_norms import RMSNormalization as RMSNormalization

    __all__ += ["RMSNormalization"]
