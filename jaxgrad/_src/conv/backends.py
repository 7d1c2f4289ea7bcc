"""The backends of the convolutions; among those of one platform, the preferred one first."""

from jaxgrad._src.conv.backend import ConvBackend
from jaxgrad._src.conv.kernels.cpu import CPU, ONEDNN, OWN_KERNELS
from jaxgrad._src.conv.kernels.cudnn import CudnnBackend
from jaxgrad._src.conv.kernels.depthwise_cuda import DepthwiseCudaBackend

BACKENDS: tuple[ConvBackend, ...] = (OWN_KERNELS, ONEDNN, CPU, DepthwiseCudaBackend(), CudnnBackend())
