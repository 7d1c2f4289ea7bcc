"""The convolution passes on oneDNN: plans, and the calls of ffi/cpu/conv/handler.cc."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxgrad._src.choice.op import Rejection
from jaxgrad._src.conv.backend import PASSES
from jaxgrad._src.conv.call.geometry import ConvGeometry, dilated_size
from jaxgrad._src.conv.call.params import ConvCall
from jaxgrad._src.conv.call.problem import ConvProblem
from jaxgrad._src.conv.kernels.cpu_handlers import HandlerBackend, call_handler
from jaxgrad._src.conv.on_xla.xla import add_bias_and_relu
from jaxgrad._src.core.jax_internals import cleared_lru_cache
from jaxgrad._src.native import cpu

_MAX_SIZE = 2**31
_DTYPES = ("float32", "bfloat16", "float16")
_VECTOR = 16  # features that a kernel of oneDNN takes at a time


class OneDnnBackend(HandlerBackend):
    """oneDNN on the CPU."""

    implementation = "onednn"
    title = "kernels of oneDNN"
    description = "oneDNN"

    def unavailable(self) -> str:
        return cpu.onednn_unavailable()

    def supports(self, pass_name: str, call: ConvCall) -> Rejection | None:
        dtype, g = call.problem.dtype.name, call.problem.geometry
        if dtype not in _DTYPES:
            return Rejection(f"oneDNN has no {dtype}")
        padding = (size for pair in g.padding for size in pair)
        if max(*g.x_spatial, *g.y_spatial, *g.window_strides, *g.rhs_dilation, *padding) >= _MAX_SIZE:
            return Rejection("oneDNN takes sizes, strides, dilation and padding below 2^31")
        return None

    def find_plan(self, pass_name: str, call: ConvCall) -> Rejection | None:
        if pass_name == "weight_gradient" and (reason := _wrong_weight_gradient(call.problem.geometry)):
            return Rejection(reason)
        has_bias = call.fused_bias and pass_name != "input_gradient"
        plan = onednn_plan(pass_name, computed_problem(pass_name, call.problem), has_bias)
        if plan is None or plan.kernel.startswith("ref"):
            return Rejection(f"oneDNN has no optimized kernel for the pass {pass_name} of this problem")
        return None

    def remark(self, pass_name: str, call: ConvCall) -> str:
        value = "input_gradient" if call.transposed else "forward"
        return "XLA applies relu" if call.relu and pass_name == value else ""

    def plan_cache_info(self) -> dict[str, int]:
        return dict(cpu.module.conv_plan_cache_info()) if cpu.module is not None else {}

    def call(
        self,
        pass_name: str,
        problem: ConvProblem,
        operands: tuple[jax.Array, ...],
        has_bias: bool,
        relu: bool = False,
    ) -> tuple[jax.Array, ...]:
        compute = computed_problem(pass_name, problem)
        plan = onednn_plan(pass_name, compute, has_bias)
        if plan is None:  # only a forced call that vmap has changed: the selection asked for the call itself
            raise NotImplementedError(
                f"oneDNN has no kernel for the pass {pass_name} of {compute.geometry} under vmap; "
                "implementation='xla' runs it"
            )
        target = f"jaxgrad_onednn_conv_{pass_name}"
        found = call_handler(target, pass_name, compute, operands, has_bias, plan.workspace)
        first, *bias = (array.astype(problem.dtype) for array in found)
        # The relu of oneDNN returns zero for NaN.
        return add_bias_and_relu(first, None, relu, problem.geometry.out_spec), *bias


class OneDnnPlan(NamedTuple):
    """A plan: bytes of workspace, and the name of the kernel. Small weight gradients of several problems have one of
    jaxgrad, ffi/cpu/conv/small_plan.h."""

    workspace: int
    kernel: str


@cleared_lru_cache(4096)
def onednn_plan(pass_name: str, problem: ConvProblem, has_bias: bool) -> OneDnnPlan | None:
    """Returns the plan of a call, or None if oneDNN has none. The C++ module keeps the plan for the call itself.

    The dtype of the problem is the one that is computed in: float32 or bfloat16.
    """
    shapes = [(*problem.num_problems, *shape) for shape in problem.shapes]
    is_bfloat16 = problem.dtype == jnp.bfloat16
    attributes = problem.geometry.attributes()
    found = cpu.module.conv_plan(PASSES.index(pass_name), is_bfloat16, has_bias, shapes, attributes)
    return None if found is None else OneDnnPlan(*found)


def computed_problem(pass_name: str, problem: ConvProblem) -> ConvProblem:
    """The problem in the dtype that oneDNN computes in: float32 for float16, and for bfloat16 without good kernels."""
    use_bfloat16 = problem.dtype == jnp.bfloat16 and onednn_has_bfloat16()
    use_bfloat16 = use_bfloat16 and not _reads_uninitialized_memory(pass_name, problem)
    use_bfloat16 = use_bfloat16 and not _covers_only_padding(problem.geometry)
    return problem.in_dtype(jnp.dtype("bfloat16" if use_bfloat16 else "float32"))


def _reads_uninitialized_memory(pass_name: str, problem: ConvProblem) -> bool:
    """Whether the bfloat16 kernel reads memory that it never wrote, or that is not its own.

    The weight gradient of oneDNN 3.2 does if the last spatial axis is shorter than its stride and, with three spatial
    axes, if no window lies within the first one: no position then covers all elements of the window at once. With
    dilation of another axis than the last, it does for features that are no multiple of a vector.
    """
    if pass_name != "weight_gradient":
        return False
    g = problem.geometry
    has_part_of_vector = problem.features // g.feature_group_count % _VECTOR != 0
    return (
        g.x_spatial[-1] < g.window_strides[-1]
        or (len(g.w_spatial) == 3 and not _window_fits_inside(g))
        or (has_part_of_vector and any(dilation > 1 for dilation in g.rhs_dilation[:-1]))
    )


def _covers_only_padding(geometry: ConvGeometry) -> bool:
    """Whether the windows cover no element of x, as with a dilated window over a short axis. The products are zero.

    oneDNN 3.2 crashes while it creates the bfloat16 forward kernel for AMX, if this holds for the first spatial axis.
    """
    return any(
        all(not 0 <= start + tap < size for start in _window_starts(geometry, axis) for tap in _taps(geometry, axis))
        for axis, size in enumerate(geometry.x_spatial)
    )


def _wrong_weight_gradient(geometry: ConvGeometry) -> str:
    """Returns why the weight gradient of oneDNN 3.2 is wrong; empty if it is right.

    Both reasons are of kernels with three spatial axes. With strides and no window inside the first axis, the kernel
    adds products to other elements, or writes past the end of the weight gradient.
    """
    g = geometry
    if len(g.w_spatial) < 3:
        return ""
    if g.window_strides[0] > 1 and not _window_fits_inside(g):
        return "with strides, oneDNN computes the weight gradient only if a window lies within the first spatial axis"
    if any(all(not 0 <= start + tap < g.x_spatial[0] for start in _window_starts(g, 0)) for tap in _taps(g, 0)):
        return "oneDNN does not write the weight gradient where the window covers only padding"
    return ""


def _window_fits_inside(g: ConvGeometry) -> bool:
    """Whether some position of the window covers no padding of the first spatial axis."""
    window = dilated_size(g.w_spatial[0], g.rhs_dilation[0])
    return any(0 <= start <= g.x_spatial[0] - window for start in _window_starts(g, 0))


def _window_starts(g: ConvGeometry, axis: int) -> range:
    """The positions of the window along a spatial axis of x."""
    stride, low = g.window_strides[axis], g.padding[axis][0]
    return range(-low, g.y_spatial[axis] * stride - low, stride)


def _taps(g: ConvGeometry, axis: int) -> range:
    """The elements of the window along a spatial axis, from its start."""
    return range(0, g.w_spatial[axis] * g.rhs_dilation[axis], g.rhs_dilation[axis])


@cache
def onednn_has_bfloat16() -> bool:
    """Whether oneDNN has optimized bfloat16 kernels for this processor."""
    g = ConvGeometry((0, 1, 2), (0, 1, 2), (0, 1, 2), (1,), ((0, 0),), (1,), 1, (32,), (3,))
    plan = onednn_plan("forward", ConvProblem(g, 1, 64, 64, jnp.dtype("bfloat16")), False)
    return plan is not None and "ref" not in plan.kernel
