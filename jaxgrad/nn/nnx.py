"""Layers of flax.nnx on the ops of jaxgrad."""

from jaxgrad._src.core.optional import require as _require

_require("flax", extra="flax", module="jaxgrad.nn.nnx")

from jaxgrad._src.nn.nnx_batch_norm import BatchNorm as BatchNorm  # noqa: E402
from jaxgrad._src.nn.nnx_rnn import RNN as RNN  # noqa: E402

__all__ = ["RNN", "BatchNorm"]
