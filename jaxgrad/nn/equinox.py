"""Layers of equinox on the ops of jaxgrad."""

from jaxgrad._src.core.optional import require as _require

_require("equinox", extra="equinox", module="jaxgrad.nn.equinox")

from jaxgrad._src.nn.equinox_batch_norm import BatchNorm as BatchNorm  # noqa: E402
from jaxgrad._src.nn.equinox_gru import scan_gru as scan_gru  # noqa: E402
from jaxgrad._src.nn.equinox_norms import GroupNorm as GroupNorm  # noqa: E402
from jaxgrad._src.nn.equinox_norms import LayerNorm as LayerNorm  # noqa: E402
from jaxgrad._src.nn.equinox_norms import RMSNorm as RMSNorm  # noqa: E402

__all__ = ["BatchNorm", "GroupNorm", "LayerNorm", "RMSNorm", "scan_gru"]
