"""Calls of the convolution handlers for CPUs, those of oneDNN and those of jaxgrad's kernels.

The handlers take an axis of independent problems before the axes of the geometry. If the batch is the first axis of an
array, its problems are passed as rows of one batch: the calls around it whose problems share their weights do the same,
and XLA then computes the common operand once.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxgrad._src.conv.backend import ConvBackend, named_arrays
from jaxgrad._src.conv.call.geometry import maybe_reverse_window
from jaxgrad._src.conv.call.params import ConvParams
from jaxgrad._src.conv.call.problem import ConvProblem, forward_problem, input_gradient_problem, weight_gradient_problem
from jaxgrad._src.native.ffi import empty_if_none, ffi_call


class HandlerBackend(ConvBackend):
    """The passes on the handlers of one library."""

    platform = "cpu"
    takes_independent_problems = True
    depends_on_problem_only = True

    def call(
        self,
        pass_name: str,
        problem: ConvProblem,
        operands: tuple[jax.Array, ...],
        has_bias: bool,
        relu: bool = False,
    ) -> tuple[jax.Array, ...]:
        """Calls the handler of a pass; arguments and results as of `call_handler`, in the dtype of the problem."""
        raise NotImplementedError

    def forward(self, params: ConvParams, relu: bool, x: jax.Array, w: jax.Array, bias: jax.Array | None) -> jax.Array:
        g = params.geometry
        operands = (x, maybe_reverse_window(g, w), empty_if_none(bias, x.dtype))
        (y,) = self.call("forward", forward_problem(g, x, w), operands, bias is not None, relu)
        return y

    def input_gradient(self, params: ConvParams, dy: jax.Array, w: jax.Array) -> jax.Array:
        g = params.geometry
        (dx,) = self.call("input_gradient", input_gradient_problem(g, dy, w), (dy, maybe_reverse_window(g, w)), False)
        return dx

    def weight_gradient(
        self, params: ConvParams, needs_bias_gradient: bool, x: jax.Array, dy: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        g = params.geometry
        dw, db = self.call("weight_gradient", weight_gradient_problem(g, x, dy), (x, dy), needs_bias_gradient)
        return maybe_reverse_window(g, dw), db if needs_bias_gradient else None


def call_handler(
    target: str,
    pass_name: str,
    problem: ConvProblem,
    operands: tuple[jax.Array, ...],
    has_bias: bool,
    workspace: int,
    **attributes: Any,
) -> tuple[jax.Array, ...]:
    """Calls a handler in the dtype of the problem.

    Args:
      target: the name of the handler.
      pass_name: its pass.
      problem: the problem. Operands of another dtype are converted.
      operands: x, w and the bias or an empty array; dy and w; or x and dy.
      has_bias: whether the pass adds a bias, or returns its gradient.
      workspace: bytes of workspace.
      **attributes: attributes of the handler besides those of the geometry.

    Returns:
      y; dx; or dw and the bias gradient, which is empty without `has_bias`.
    """
    g, num_problems = problem.geometry, problem.num_problems
    x, w, y = ((*num_problems, *shape) for shape in problem.shapes)
    # The layouts of operands and results with a batch, and the shapes of the results.
    layouts, results = {
        "forward": ((g.lhs_spec, None, None), ((y, g.out_spec),)),
        "input_gradient": ((g.out_spec, None), ((x, g.lhs_spec),)),
        "weight_gradient": (
            (g.lhs_spec, g.out_spec),
            ((w, None), ((*num_problems, problem.out_features) if has_bias else (0,), None)),
        ),
    }[pass_name]
    taken = [
        array.astype(problem.dtype).reshape(_as_one_batch(array.shape, layout))
        for array, layout in zip(operands, layouts, strict=True)
    ]
    returned = [jax.ShapeDtypeStruct(_as_one_batch(*result), problem.dtype) for result in results]
    named = named_arrays(pass_name, *taken[:2], returned[0])
    found = ffi_call(target, returned, taken, workspace, named=named, **g.attributes(), **attributes)
    return tuple(array.reshape(shape) for array, (shape, _) in zip(found, results, strict=True))


def _as_one_batch(shape: tuple[int, ...], layout: tuple[int, ...] | None) -> tuple[int, ...]:
    """The shape with independent problems, if there are any, as rows of one batch, if the batch is the first axis."""
    if layout is None or len(shape) == len(layout) or layout[0] != 0:
        return shape
    return (shape[0] * shape[1], *shape[2:])
