"""jaxgrad: JAX ops whose gradients are hand-written kernels."""

from jaxgrad._dispatch import Choice as Choice
from jaxgrad._dispatch import explain as explain
from jaxgrad._version import __version__ as __version__
from jaxgrad.gru import gru as gru

__all__ = ["Choice", "__version__", "explain", "gru"]
