"""The cuDNN backend of batch normalization, through the handlers in ffi/cuda/cudnn_batch_norm.

cuDNN computes y and all statistics in one call, and the gradients of x, scale and bias in another. It adds relu, and a
residual before relu, where the channels are the last dimension; XLA computes the rest. cuDNN's mean has no `mean_low`.
The channels of all calls are the channels of one call of cuDNN.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrad._src.choice.op import Rejection
from jaxgrad._src.choice.table import Row, preference
from jaxgrad._src.core.jax_internals import cleared_lru_cache
from jaxgrad._src.native import cuda
from jaxgrad._src.native.ffi import empty_if_none, ffi_call
from jaxgrad._src.norm import xla
from jaxgrad._src.norm.backend import Gradients, NormBackend, compute_dtype
from jaxgrad._src.norm.params import NormParams, NormProblem
from jaxgrad._src.run.batching import fold, unfold


class BatchNormFeatures(NamedTuple):
    """The features that the tables of preferences know: elements of a channel, channels, and cuDNN's fast kernels."""

    rows: int
    channels: int
    fast_kernels: bool


class CudnnBackend(NormBackend):
    implementation = "cudnn"
    platform = "cuda"
    title = "cuDNN kernels"
    description = "cuDNN launches the fewest kernels"
    can_skip_dx = False

    def unavailable(self) -> str:
        return cuda.unavailable()

    def reject(self, pass_name: str, call: NormProblem, *, forced: bool) -> Rejection | None:
        # Without elements there is no kernel call.
        return super().reject(pass_name, call, forced=forced) if call.size else self.missing()

    def supports(self, pass_name: str, call: NormProblem) -> Rejection | None:
        if call.num_groups is not None or call.activation not in (None, "relu"):
            return Rejection("cuDNN supports batch normalization without an activation or with relu")
        if call.size < 2**31:  # cuDNN counts elements in 32 bits
            return None
        return Rejection(f"cuDNN supports fewer than 2^31 elements, x has {call.size}")

    def why_slower(self, pass_name: str, call: NormProblem) -> str:
        if loses_digits(call):
            return "XLA keeps twice the digits of the mean in this dtype, and is about as fast"
        return super().why_slower(pass_name, call)

    def row(self, pass_name: str, call: NormProblem, *, resized: bool = False) -> Row | None:
        if resized or loses_digits(call) or not call.size:
            return None
        features = BatchNormFeatures(call.outer * call.inner, call.channels, has_fast_kernels(call))
        return preference("batch_norm", pass_name, self.platform, features, (self.implementation, "xla"))

    def find_plan(self, pass_name: str, call: NormProblem) -> Rejection | None:
        """Both passes run on cuDNN, or neither does.

        Raises RuntimeError where cuDNN failed in a multi-process program: other processes, in which cuDNN works, would
        lower another program.
        """
        fuses = call.activation is not None and _can_fuse(call)
        try:
            for is_backward in (False, True):
                residual = fuses and call.residual
                relu = fuses and not (is_backward and residual)
                if _workspace(call, is_backward=is_backward, relu=relu, residual=residual and not is_backward) is None:
                    return Rejection("cuDNN does not support this call")
        except RuntimeError as error:
            if jax.process_count() > 1:
                raise
            return Rejection(f"cuDNN failed: {error}", missing=str(error))
        return None

    def typical_rejection(self, op_name: str, pass_name: str) -> Rejection | None:
        return Rejection("XLA is as fast for most arrays, and fuses the neighboring operations", slower=True)

    def forward(self, params, x, scale, bias, residual):
        axis, relu = params.feature_axis, params.activation is not None
        problem = dataclasses.replace(params.problem(x), residual=residual is not None)
        calls, x, residual = x.shape[0], fold(x, axis), None if residual is None else fold(residual, axis)
        fuses = relu and _can_fuse(problem)
        scale, bias = fold(scale, 0), fold(bias, 0)
        y, mean, rstd, unbiased_var = _forward_call(params, problem, x, scale, bias, residual if fuses else None, fuses)
        if not fuses:
            if residual is not None:
                y = (y.astype(mean.dtype) + residual.astype(mean.dtype)).astype(y.dtype)
            y = jax.nn.relu(y) if relu else y
        n = problem.outer * problem.inner
        var = unbiased_var * ((n - 1) / n) if n > 1 else jnp.where(jnp.isfinite(mean), 0, jnp.nan)
        statistics = mean, jnp.zeros_like(mean), var.astype(mean.dtype), rstd
        return unfold(y, axis, calls), *(unfold(each, 0, calls) for each in statistics)

    def backward(self, params, x, scale, bias, statistics, y, residual, dy, dmean, dvar, *, needs_grad):
        axis, calls, problem = params.feature_axis, x.shape[0], params.problem(x)
        fuses = params.activation is not None and y is None and has_fast_kernels(problem)
        g = dy
        if params.activation is not None and not fuses:
            mask = xla.over_calls(partial(xla.relu_mask, params))(x, scale, bias, statistics, y)
            g = jnp.where(mask, dy, 0)
        arrays = fold(scale, 0), fold(bias, 0) if fuses else None, fold(statistics.mean, 0), fold(statistics.rstd, 0)
        dx, *channels = _backward_call(params, problem, fold(x, axis), fold(g, axis), *arrays, fuses)
        dx, (dscale, dbias) = unfold(dx, axis, calls), (unfold(each, 0, calls) for each in channels)
        if dmean is not None or dvar is not None:
            through = xla.over_calls(partial(xla.gradient_through_statistics, params))(x, statistics, dmean, dvar)
            dx = (dx.astype(through.dtype) + through).astype(x.dtype)
        found = Gradients(dx, dscale, dbias, g)
        return Gradients(*(gradient if needed else None for gradient, needed in zip(found, needs_grad, strict=True)))


def has_fast_kernels(problem: NormProblem) -> bool:
    """Whether cuDNN has its fast kernels, which also apply relu: for channels in the last dimension."""
    return problem.inner == 1 and problem.dtype != np.float64


def loses_digits(problem: NormProblem) -> bool:
    """Whether cuDNN's mean has fewer correct digits than XLA's."""
    return has_fast_kernels(problem) and problem.dtype.itemsize > 2


def _can_fuse(problem: NormProblem) -> bool:
    """Whether cuDNN has a kernel with relu and, if the problem has one, the residual before it."""
    return has_fast_kernels(problem) and (not problem.residual or _channels(problem) % 4 == 0)


def _channels(problem: NormProblem) -> int:
    """The channels of all calls, which are those of one call of cuDNN."""
    return problem.calls * problem.channels


def _workspace(problem: NormProblem, *, is_backward: bool, relu: bool, residual: bool) -> int | None:
    """Returns bytes, or None where cuDNN does not support the call on the GPU of this machine.

    Without a GPU on this machine the result is an estimate. Where the program runs, the handler allocates memory for
    the call if the estimate is too small, or raises an error while XLA records the call into a CUDA graph.

    Raises:
      RuntimeError: cuDNN failed, for instance because the GPU's memory is full. It is not remembered.
    """
    sizes = (problem.outer, _channels(problem), problem.inner)
    return _cached_workspace(is_backward, cuda.float_type(problem.dtype), *sizes, relu, residual)


def _workspace_of_call(problem: NormProblem, *, is_backward: bool, relu: bool, residual: bool) -> int:
    workspace = _workspace(problem, is_backward=is_backward, relu=relu, residual=residual)
    if workspace is None:  # only a forced call that vmap has changed: the selection asked for the call itself
        raise NotImplementedError(f"cuDNN does not support {problem} under vmap; implementation='xla' runs it")
    return workspace


@cleared_lru_cache(4096)
def _cached_workspace(
    is_backward: bool, float_type: int, outer: int, channels: int, inner: int, relu: bool, residual: bool
) -> int | None:
    device = cuda.gpu_ordinal()
    if device is None:
        # cuDNN needed less than 10 bytes per row and 100 per channel, and one bit per element of the residual, in all
        # cases that were tried.
        return (8 << 20) + 32 * outer + 1024 * channels + (outer * channels * inner // 4 if residual else 0)
    return cuda.module.batch_norm_workspace(device, is_backward, float_type, outer, channels, inner, relu, residual)


def _forward_call(
    params: NormParams,
    problem: NormProblem,
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    residual: jax.Array | None,
    relu: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns `(y, mean, rstd, unbiased_var)`."""
    channels = jax.ShapeDtypeStruct((_channels(problem),), compute_dtype(x))
    running = jax.ShapeDtypeStruct((2, _channels(problem)), channels.dtype)  # the mean and the unbiased variance
    y, mean, rstd, statistics = ffi_call(
        "jaxgrad_cudnn_batch_norm_forward",
        (jax.ShapeDtypeStruct(x.shape, x.dtype), channels, channels, running),
        (x, scale, bias, empty_if_none(residual, x.dtype)),
        _workspace_of_call(problem, is_backward=False, relu=relu, residual=residual is not None),
        named={"x": x, "mean": channels},
        **_attributes(params, relu),
    )
    return y, mean, rstd, statistics[1]


def _backward_call(
    params: NormParams,
    problem: NormProblem,
    x: jax.Array,
    dy: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None,
    mean: jax.Array,
    rstd: jax.Array,
    relu: bool,
) -> list[jax.Array]:
    """Returns `[dx, dscale, dbias]`. The bias is read where `relu`."""
    channels = jax.ShapeDtypeStruct((_channels(problem),), compute_dtype(x))
    return ffi_call(
        "jaxgrad_cudnn_batch_norm_backward",
        (jax.ShapeDtypeStruct(x.shape, x.dtype), channels, channels),
        (x, dy, scale, empty_if_none(bias, channels.dtype), mean, rstd),
        _workspace_of_call(problem, is_backward=True, relu=relu, residual=False),
        named={"x": x, "mean": mean},
        **_attributes(params, relu),
    )


def _attributes(params: NormParams, relu: bool) -> dict[str, Any]:
    return {"feature_axis": params.feature_axis, "epsilon": params.epsilon, "relu": relu}
