"""jaxgrad: JAX ops with fast gradients, computed by cuDNN, oneDNN and hand-written kernels.

The import registers the kernels, which exported programs call, and the settings, most of which are part of JAX's trace
context.
All else is loaded where it is first used.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

from jaxgrad._src.native.checkout import require_compiled_kernels as _require_compiled_kernels

_require_compiled_kernels()

from jaxgrad import config as config  # noqa: E402
from jaxgrad._src.native import cpu as _cpu_kernels  # noqa: E402, F401
from jaxgrad._src.native import cuda as _cuda_kernels  # noqa: E402, F401
from jaxgrad._src.run import compiled_caches as _compiled_caches  # noqa: E402, F401

if TYPE_CHECKING:
    from jaxgrad import convert as convert
    from jaxgrad import nn as nn
    from jaxgrad._src.accelerate.api import accelerate as accelerate
    from jaxgrad._src.accelerate.calls import Call as Call
    from jaxgrad._src.accelerate.calls import Convolution as Convolution
    from jaxgrad._src.accelerate.calls import Layer as Layer
    from jaxgrad._src.accelerate.report import report as report
    from jaxgrad._src.accelerate.results import Report as Report
    from jaxgrad._src.choice.explain import Explanation as Explanation
    from jaxgrad._src.choice.explain import PassExplanation as PassExplanation
    from jaxgrad._src.choice.explain import explain as explain
    from jaxgrad._src.choice.op import plan_cache_info as plan_cache_info
    from jaxgrad._src.conv.api import conv_general_dilated as conv_general_dilated
    from jaxgrad._src.conv.transpose import conv_transpose as conv_transpose
    from jaxgrad._src.gru.api import gru as gru
    from jaxgrad._src.norm.batch_norm import batch_norm_inference as batch_norm_inference
    from jaxgrad._src.norm.batch_norm import batch_norm_training as batch_norm_training
    from jaxgrad._src.norm.group_norm import group_norm as group_norm
    from jaxgrad._src.norm.layer_norm import layer_norm as layer_norm
    from jaxgrad._src.norm.layer_norm import rms_norm as rms_norm
    from jaxgrad._src.pool.api import avg_pool as avg_pool
    from jaxgrad._src.pool.api import max_pool as max_pool
    from jaxgrad._src.resize.api import resize as resize
    from jaxgrad._src.run.export import export_disabled_checks as export_disabled_checks
    from jaxgrad._src.run.forward_mode import forward_mode as forward_mode
    from jaxgrad._src.run.forward_mode import jvp as jvp
    from jaxgrad._src.tuning.api import tune as tune
    from jaxgrad._src.tuning.tuning import Tuning as Tuning
    from jaxgrad._src.version import __version__ as __version__

__all__ = [
    "Call",
    "Convolution",
    "Explanation",
    "Layer",
    "PassExplanation",
    "Report",
    "Tuning",
    "__version__",
    "accelerate",
    "avg_pool",
    "batch_norm_inference",
    "batch_norm_training",
    "config",
    "conv_general_dilated",
    "conv_transpose",
    "convert",
    "explain",
    "export_disabled_checks",
    "forward_mode",
    "group_norm",
    "gru",
    "jvp",
    "layer_norm",
    "max_pool",
    "nn",
    "plan_cache_info",
    "report",
    "resize",
    "rms_norm",
    "tune",
]

_SUBMODULES = "convert", "nn"
# The modules of the names above, in jaxgrad._src.
_MODULES = {
    "Call": "accelerate.calls",
    "Convolution": "accelerate.calls",
    "Explanation": "choice.explain",
    "Layer": "accelerate.calls",
    "PassExplanation": "choice.explain",
    "Report": "accelerate.results",
    "Tuning": "tuning.tuning",
    "__version__": "version",
    "accelerate": "accelerate.api",
    "avg_pool": "pool.api",
    "batch_norm_inference": "norm.batch_norm",
    "batch_norm_training": "norm.batch_norm",
    "conv_general_dilated": "conv.api",
    "conv_transpose": "conv.transpose",
    "explain": "choice.explain",
    "export_disabled_checks": "run.export",
    "forward_mode": "run.forward_mode",
    "group_norm": "norm.group_norm",
    "gru": "gru.api",
    "jvp": "run.forward_mode",
    "layer_norm": "norm.layer_norm",
    "max_pool": "pool.api",
    "plan_cache_info": "choice.op",
    "report": "accelerate.report",
    "resize": "resize.api",
    "rms_norm": "norm.layer_norm",
    "tune": "tuning.api",
}
_OPS = "conv_general_dilated", "conv_transpose", "batch_norm_training", "group_norm", "layer_norm", "gru", "max_pool"


def __getattr__(name: str) -> _Any:
    if name in _SUBMODULES:
        return _import_module(f"jaxgrad.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'jaxgrad' has no attribute {name!r}")
    if name in ("explain", "plan_cache_info"):  # they know the ops that are loaded
        for op in _OPS:
            __getattr__(op)
    value = globals()[name] = getattr(_import_module(f"jaxgrad._src.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
