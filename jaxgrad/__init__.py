"""jaxgrad: JAX ops whose gradients are hand-written kernels."""

from jaxgrad import config as config
from jaxgrad._dispatch import Choice as Choice
from jaxgrad._dispatch import explain as explain
from jaxgrad._export import export_disabled_checks as export_disabled_checks
from jaxgrad._ffi import plan_cache_info as plan_cache_info
from jaxgrad._forward_mode import forward_mode as forward_mode
from jaxgrad._forward_mode import jvp as jvp
from jaxgrad._version import __version__ as __version__
from jaxgrad.batch_norm import batch_norm_inference as batch_norm_inference
from jaxgrad.batch_norm import batch_norm_training as batch_norm_training
from jaxgrad.conv import conv_general_dilated as conv_general_dilated
from jaxgrad.conv_transpose import conv_transpose as conv_transpose
from jaxgrad.gru import gru as gru

__all__ = [
    "Choice",
    "__version__",
    "batch_norm_inference",
    "batch_norm_training",
    "config",
    "conv_general_dilated",
    "conv_transpose",
    "explain",
    "export_disabled_checks",
    "forward_mode",
    "gru",
    "jvp",
    "plan_cache_info",
]
