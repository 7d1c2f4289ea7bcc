"""The handlers of pooling, which the backends of both platforms call with the same operands and attributes."""

from __future__ import annotations

import jax

from jaxgrad._src.choice.op import Rejection
from jaxgrad._src.native.ffi import ffi_call
from jaxgrad._src.pool.backend import PoolBackend
from jaxgrad._src.pool.params import PoolParams, PoolProblem

_MAX_AXES = 3
# In the order of the compiled modules.
_PASSES = (
    "max_pool_forward",
    "max_pool_input_gradient",
    "max_pool_tangent",
    "sum_pool_forward",
    "sum_pool_input_gradient",
)


class HandlerBackend(PoolBackend):
    """A backend whose handlers are `jaxgrad_<implementation>_max_pool_<pass>` and `..._sum_pool_<pass>`."""

    def supports(self, pass_name: str, call: PoolProblem) -> Rejection | None:
        if call.window.ndim > _MAX_AXES:
            return Rejection(
                f"the {self.title} take 1 to {_MAX_AXES} spatial axes, window_shape has {call.window.ndim}"
            )
        return self.supports_sizes(_PASSES.index(f"{call.op.replace('avg', 'sum')}_{pass_name}"), call)

    def supports_sizes(self, number: int, problem: PoolProblem) -> Rejection | None:
        """Returns why the kernels cannot compute a pass, by its number in the compiled module; None if they can."""
        raise NotImplementedError

    def workspace(self, number: int, problem: PoolProblem) -> int:
        """Returns the bytes of workspace of a pass."""
        raise NotImplementedError

    def max_forward(self, params, x):
        return self._call(params, "max_pool_forward", x)

    def max_input_gradient(self, params, x, dy):
        return self._call(params, "max_pool_input_gradient", x, dy)

    def max_tangent(self, params, x, dx):
        return self._call(params, "max_pool_tangent", x, dx)

    def sum_forward(self, params, x):
        return self._call(params, "sum_pool_forward", x)

    def sum_input_gradient(self, params, dy):
        return self._call(params, "sum_pool_input_gradient", dy)

    def _call(self, params: PoolParams, name: str, *arrays: jax.Array) -> jax.Array:
        """Calls a handler, for arrays with one outer axis and the channels last."""
        window, problem = params.window, params.problem(arrays[0])
        shapes = {"x": problem.shape, "y": window.y_shape(problem.shape)}
        result = shapes["x" if name.endswith("input_gradient") else "y"]
        (found,) = ffi_call(
            f"jaxgrad_{self.implementation}_{name}",
            [jax.ShapeDtypeStruct(window.canonical(result), problem.dtype)],
            [array.reshape(window.canonical(array.shape)) for array in arrays],
            self.workspace(_PASSES.index(name), problem),
            named={key: jax.ShapeDtypeStruct(window.canonical(shape), problem.dtype) for key, shape in shapes.items()},
            **attributes(problem),
            **({"divisor": params.divisor} if name.startswith("sum_pool") else {}),
        )
        return found.reshape(result)


def shapes(problem: PoolProblem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of x and y as handlers take them."""
    window = problem.window
    return window.canonical(problem.shape), window.canonical(window.y_shape(problem.shape))


def attributes(problem: PoolProblem) -> dict[str, tuple[int, ...]]:
    window = problem.window
    return {
        "window": window.shape,
        "strides": window.strides,
        "padding": tuple(size for pair in window.padding for size in pair),
        "dilation": window.dilation,
    }
