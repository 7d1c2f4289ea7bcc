"""The only place that calls `jax.ffi`: registers the compiled handlers and spells out each call's attributes.

An absent operand is passed, and an unwanted result asked for, as an array without elements.
"""

from jaxgrad._ffi.batch_norm import batch_norm_backward as batch_norm_backward
from jaxgrad._ffi.batch_norm import batch_norm_normalise as batch_norm_normalise
from jaxgrad._ffi.batch_norm import batch_norm_statistics as batch_norm_statistics
from jaxgrad._ffi.batch_norm_cuda import cuda_batch_norm_backward as cuda_batch_norm_backward
from jaxgrad._ffi.batch_norm_cuda import cuda_batch_norm_forward as cuda_batch_norm_forward
from jaxgrad._ffi.batch_norm_cuda import cuda_batch_norm_fuses as cuda_batch_norm_fuses
from jaxgrad._ffi.batch_norm_cuda import cuda_batch_norm_problem as cuda_batch_norm_problem
from jaxgrad._ffi.conv import CONV_KINDS as CONV_KINDS
from jaxgrad._ffi.conv import conv_backward_filter as conv_backward_filter
from jaxgrad._ffi.conv import conv_backward_input as conv_backward_input
from jaxgrad._ffi.conv import conv_computed as conv_computed
from jaxgrad._ffi.conv import conv_forward as conv_forward
from jaxgrad._ffi.conv import conv_plan as conv_plan
from jaxgrad._ffi.conv import conv_plan_cache_info as conv_plan_cache_info
from jaxgrad._ffi.conv_cuda import Epilogue as Epilogue
from jaxgrad._ffi.conv_cuda import allows_tf32 as allows_tf32
from jaxgrad._ffi.conv_cuda import cuda_conv_backward_filter as cuda_conv_backward_filter
from jaxgrad._ffi.conv_cuda import cuda_conv_backward_input as cuda_conv_backward_input
from jaxgrad._ffi.conv_cuda import cuda_conv_forward as cuda_conv_forward
from jaxgrad._ffi.conv_cuda import cuda_conv_plan as cuda_conv_plan
from jaxgrad._ffi.conv_cuda import plan_cache_info as plan_cache_info
from jaxgrad._ffi.conv_cuda import transposes_filter as transposes_filter
from jaxgrad._ffi.conv_cuda import use_plan_cache_dir as use_plan_cache_dir
from jaxgrad._ffi.depthwise import cuda_depthwise_filter as cuda_depthwise_filter
from jaxgrad._ffi.depthwise import cuda_depthwise_problem as cuda_depthwise_problem
from jaxgrad._ffi.gru import GruSizes as GruSizes
from jaxgrad._ffi.gru import gru_backward as gru_backward
from jaxgrad._ffi.gru import gru_forward as gru_forward
from jaxgrad._ffi.registration import builds as builds
from jaxgrad._ffi.registration import cpu_build as cpu_build
from jaxgrad._ffi.registration import cpu_problem as cpu_problem
from jaxgrad._ffi.registration import cpu_targets as cpu_targets
from jaxgrad._ffi.registration import cuda_build as cuda_build
from jaxgrad._ffi.registration import cuda_problem as cuda_problem
from jaxgrad._ffi.registration import cuda_targets as cuda_targets
from jaxgrad._ffi.registration import cudnn_problem as cudnn_problem
from jaxgrad._ffi.registration import gpu_ordinal as gpu_ordinal
from jaxgrad._ffi.registration import nvrtc_problem as nvrtc_problem
from jaxgrad._ffi.registration import onednn_problem as onednn_problem
