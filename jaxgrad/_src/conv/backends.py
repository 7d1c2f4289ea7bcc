"""The backends of the convolutions; among those of one platform, the preferred one first."""

from jaxgrad._src.conv.backend import ConvBackend
from jaxgrad._src.conv.kernels.cudnn import CudnnBackend
from jaxgrad._src.conv.kernels.depthwise_cpu import DepthwiseCpuBackend
from jaxgrad._src.conv.kernels.depthwise_cuda import DepthwiseCudaBackend
from jaxgrad._src.conv.kernels.onednn import OneDnnBackend

_ONEDNN, _CUDNN = OneDnnBackend(), CudnnBackend()
BACKENDS: tuple[ConvBackend, ...] = (DepthwiseCpuBackend(_ONEDNN), _ONEDNN, DepthwiseCudaBackend(_CUDNN), _CUDNN)
