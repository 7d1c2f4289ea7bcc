"""jaxgrad: JAX ops with fast gradients, computed by cuDNN, oneDNN and hand-written kernels."""

from jaxgrad._src.native.checkout import require_compiled_kernels as _require_compiled_kernels

_require_compiled_kernels()

from jaxgrad import config as config  # noqa: E402
from jaxgrad._src.accelerate.api import accelerate as accelerate  # noqa: E402
from jaxgrad._src.accelerate.report import Convolution as Convolution  # noqa: E402
from jaxgrad._src.accelerate.report import Report as Report  # noqa: E402
from jaxgrad._src.accelerate.report import report as report  # noqa: E402
from jaxgrad._src.batch_norm.api import batch_norm_inference as batch_norm_inference  # noqa: E402
from jaxgrad._src.batch_norm.api import batch_norm_training as batch_norm_training  # noqa: E402
from jaxgrad._src.conv.api import conv_general_dilated as conv_general_dilated  # noqa: E402
from jaxgrad._src.conv.transpose import conv_transpose as conv_transpose  # noqa: E402
from jaxgrad._src.core.explain import Explanation as Explanation  # noqa: E402
from jaxgrad._src.core.explain import PassExplanation as PassExplanation  # noqa: E402
from jaxgrad._src.core.explain import explain as explain  # noqa: E402
from jaxgrad._src.core.export import export_disabled_checks as export_disabled_checks  # noqa: E402
from jaxgrad._src.core.forward_mode import forward_mode as forward_mode  # noqa: E402
from jaxgrad._src.core.forward_mode import jvp as jvp  # noqa: E402
from jaxgrad._src.core.op import plan_cache_info as plan_cache_info  # noqa: E402
from jaxgrad._src.gru.api import gru as gru  # noqa: E402
from jaxgrad._src.tuning.api import tune as tune  # noqa: E402
from jaxgrad._src.tuning.tuning import Tuning as Tuning  # noqa: E402
from jaxgrad._src.version import __version__ as __version__  # noqa: E402

__all__ = [
    "Convolution",
    "Explanation",
    "PassExplanation",
    "Report",
    "Tuning",
    "__version__",
    "accelerate",
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
    "report",
    "tune",
]
