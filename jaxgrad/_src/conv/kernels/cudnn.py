"""The convolution passes on cuDNN, and the calls of ffi/cuda/cudnn_conv/handler.cc.

cuDNN takes channels-last layouts, and channels-first ones where XLA keeps them (`kernel_layouts`). XLA transposes
operands of other layouts, and filters, before the call, and results after it; it can fuse these transposes with
surrounding operations, or compute those operations in the kernel's layout. The handler itself transposes a weight
gradient where jaxgrad's kernel is faster, and then also reverses its window if needed.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxgrad._src.choice.op import Rejection
from jaxgrad._src.conv.backend import ConvBackend, named_arrays
from jaxgrad._src.conv.call.geometry import change_layout, maybe_reverse_window
from jaxgrad._src.conv.call.params import ConvCall, ConvParams
from jaxgrad._src.conv.call.problem import (
    ConvProblem,
    forward_problem,
    input_gradient_problem,
    weight_gradient_problem,
)
from jaxgrad._src.conv.call.weight_transpose import kernel_transposes
from jaxgrad._src.conv.kernels.cudnn_plan import Epilogue, cudnn_plan, search_mode
from jaxgrad._src.conv.on_xla.xla import add_bias_and_relu, bias_gradient
from jaxgrad._src.core.precision import allows_tf32
from jaxgrad._src.native import cuda
from jaxgrad._src.native.ffi import empty_if_none, ffi_call

_XLA_ON_PAR = "XLA calls cuDNN for this pass too, is as fast, and fuses the surrounding operations"


class CudnnBackend(ConvBackend):
    """cuDNN on NVIDIA GPUs."""

    implementation = "cudnn"
    platform = "cuda"
    title = "cuDNN kernels"
    description = "cuDNN"

    def unavailable(self) -> str:
        return cuda.unavailable()

    def find_plan(self, pass_name: str, call: ConvCall) -> Rejection | None:
        """Without a GPU on this machine every problem is taken to have a plan.

        Raises RuntimeError where cuDNN failed in a multi-process program: other processes, in which cuDNN works, would
        lower another program.
        """
        try:
            if pass_name == "forward" and _fuses_epilogue(call):
                return None
            plan = cudnn_plan(pass_name, call.problem, allows_tf32(call.precision), call.settings)
        except RuntimeError as error:
            if jax.process_count() > 1:
                raise
            return Rejection(f"cuDNN failed: {error}", missing=str(error))
        return None if plan is not None else Rejection(f"cuDNN has no kernel for the pass {pass_name} of this problem")

    def remark(self, pass_name: str, call: ConvCall) -> str:
        if not call.relu or pass_name != ("input_gradient" if call.transposed else "forward"):
            return ""
        if call.transposed:
            return "XLA applies relu"
        if _fuses_epilogue(call):
            return "bias and relu are fused" if call.has_bias else "relu is fused"
        if cuda.gpu_ordinal() is None:
            return "XLA applies relu: without a GPU on this machine cuDNN cannot be asked for a fused kernel"
        return "XLA applies relu: cuDNN has no fused kernel for this problem"

    def typical_rejection(self, op_name: str, pass_name: str) -> Rejection | None:
        # XLA does not recognize transposed convolutions: only the gradient of their input is a plain convolution.
        on_par = op_name != "conv_transpose" or pass_name == "forward"
        return Rejection(_XLA_ON_PAR, slower=True) if on_par else None

    def plan_cache_info(self) -> dict[str, int]:
        return dict(cuda.module.conv_plan_cache_info()) if cuda.module is not None else {}

    def forward(self, params: ConvParams, relu: bool, x: jax.Array, w: jax.Array, bias: jax.Array | None) -> jax.Array:
        # Without relu the bias is not fused either: XLA adds it as fast, and fuses it with the next operation.
        g = params.geometry
        problem = forward_problem(g, x, w)
        operands = {"x": x, "w": maybe_reverse_window(g, w)}
        call = ConvCall(problem, params.precision, params.settings, bias is not None, relu)
        if _fuses_epilogue(call):
            return _call("forward", problem, params, operands, bias, relu)
        return add_bias_and_relu(_call("forward", problem, params, operands), bias, relu, g.out_spec)

    def input_gradient(self, params: ConvParams, dy: jax.Array, w: jax.Array) -> jax.Array:
        g = params.geometry
        operands = {"y": dy, "w": maybe_reverse_window(g, w)}
        return _call("input_gradient", input_gradient_problem(g, dy, w), params, operands)

    def weight_gradient(
        self, params: ConvParams, needs_bias_gradient: bool, x: jax.Array, dy: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        g = params.geometry
        dw = _call("weight_gradient", weight_gradient_problem(g, x, dy), params, {"x": x, "y": dy})
        return dw, bias_gradient(g, dy) if needs_bias_gradient else None


def _fuses_epilogue(call: ConvCall) -> bool:
    """Whether one kernel of cuDNN computes y, adds the bias and applies relu.

    Without a GPU on this machine it is unknown whether cuDNN has the kernel, and XLA applies relu. Raises RuntimeError
    where cuDNN failed.
    """
    if not call.fused_relu or cuda.gpu_ordinal() is None:
        return False
    epilogue = Epilogue(call.fused_bias, relu=True)
    return cudnn_plan("forward", call.problem, allows_tf32(call.precision), call.settings, epilogue) is not None


def _call(
    pass_name: str,
    problem: ConvProblem,
    params: ConvParams,
    operands: dict[str, jax.Array],
    bias: jax.Array | None = None,
    relu: bool = False,
) -> jax.Array:
    """Calls the handler of a pass.

    Args:
      pass_name: the pass.
      problem: the convolution.
      params: its parameters.
      operands: two of "x", "w" and "y"; w in the order that cuDNN takes.
      bias, relu: the epilogue of the forward pass.

    Returns:
      The third of x, w and y, in the caller's layout.
    """
    geometry, dtype = problem.geometry, problem.dtype
    allow_tf32 = allows_tf32(params.precision)
    plan = cudnn_plan(pass_name, problem, allow_tf32, params.settings, Epilogue(bias is not None, relu))
    if plan is None:  # only a forced call that vmap has changed: the selection asked for the call itself
        raise NotImplementedError(
            f"cuDNN has no kernel for the pass {pass_name} of {geometry} under vmap; implementation='xla' runs it"
        )
    g = plan.geometry
    given = {"x": geometry.lhs_spec, "w": geometry.rhs_spec, "y": geometry.out_spec}
    taken = {"x": g.lhs_spec, "w": g.rhs_spec, "y": g.out_spec}
    (result,) = set("xwy") - set(operands)
    own: dict[str, Any] = {}  # attributes of this pass only
    shapes = [dict(zip("xwy", problem.with_geometry(g).shapes, strict=True))[result]]
    if result == "y":
        own["relu"] = relu
    elif result == "w":
        transposes = kernel_transposes(problem, g)
        if transposes:
            taken["w"] = geometry.rhs_spec
            shapes.insert(0, problem.w_shape)
        else:
            shapes.append((0,))
        own["dw_spec"] = list(taken["w"])
        own["dw_reversed"] = transposes and geometry.window_reversed
    arrays = [change_layout(array, given[name], taken[name]) for name, array in operands.items()]
    results = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    found, *_ = ffi_call(
        f"jaxgrad_cudnn_conv_{pass_name}",
        results,
        [*arrays, *([empty_if_none(bias, dtype)] if result == "y" else [])],
        plan.workspace,
        named=named_arrays(pass_name, *arrays, results[0]),
        **g.attributes(),
        **own,
        allow_tf32=allow_tf32,
        deterministic=params.settings.deterministic,
        search=search_mode(params.settings),
    )
    found = change_layout(found, taken[result], given[result])
    return maybe_reverse_window(geometry, found) if result == "w" and not own["dw_reversed"] else found
