"""The backends of the convolutions; among those of one platform, the preferred one first."""

from jaxgrad._src.conv.backend import ConvBackend
from jaxgrad._src.conv.cudnn import CudnnBackend
from jaxgrad._src.conv.depthwise_cuda import DepthwiseCudaBackend
from jaxgrad._src.conv.onednn import OneDnnBackend

BACKENDS: tuple[ConvBackend, ...] = (OneDnnBackend(), DepthwiseCudaBackend(), CudnnBackend())
