"""Reads and writes layers of equinox."""

from jaxgrad._src.core.optional import require as _require

_require("equinox", extra="equinox", module="jaxgrad.convert.equinox")

from jaxgrad._src.convert.equinox_gru import read_gru as read_gru  # noqa: E402
from jaxgrad._src.convert.equinox_gru import write_gru as write_gru  # noqa: E402

__all__ = ["read_gru", "write_gru"]
