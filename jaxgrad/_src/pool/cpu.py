"""The CPU backend of pooling: jaxgrad's C++ kernels in ffi/cpu/pool.

The gradient of max pooling is added in the order of the windows, and each sum is rounded to the dtype of x, as XLA
does, so that results have the same bits. Sums of average pooling are float32 for 16-bit dtypes. No result depends on
the number of threads.
"""

from __future__ import annotations

import jax

from jaxgrad._src.choice.op import Rejection
from jaxgrad._src.core.jax_internals import cleared_lru_cache
from jaxgrad._src.native import cpu
from jaxgrad._src.native.ffi import ffi_call
from jaxgrad._src.pool.backend import PoolBackend
from jaxgrad._src.pool.params import PoolParams, PoolProblem, Window

_MAX_AXES = 3
# In the order of the compiled module.
_HANDLERS = (
    "max_pool_forward",
    "max_pool_input_gradient",
    "max_pool_tangent",
    "sum_pool_forward",
    "sum_pool_input_gradient",
)


class CpuBackend(PoolBackend):
    implementation = "cpu"
    platform = "cpu"
    title = "CPU kernels"
    description = "jaxgrad's own kernel"

    def unavailable(self) -> str:
        return cpu.unavailable()

    def supports(self, pass_name: str, call: PoolProblem) -> Rejection | None:
        if call.window.ndim > _MAX_AXES:
            return Rejection(f"the CPU kernels take 1 to {_MAX_AXES} spatial axes, window_shape has {call.window.ndim}")
        try:
            _workspace(f"{call.op.replace('avg', 'sum')}_{pass_name}", call)
        except ValueError as error:  # sizes near 2^62
            return Rejection(f"the CPU kernels take smaller sizes: {error}")
        return None

    def max_forward(self, params, x):
        return _call(params, "max_pool_forward", x=x)

    def max_input_gradient(self, params, x, dy):
        return _call(params, "max_pool_input_gradient", x=x, dy=dy)

    def max_tangent(self, params, x, dx):
        return _call(params, "max_pool_tangent", x=x, dx=dx)

    def sum_forward(self, params, x):
        return _call(params, "sum_pool_forward", x=x)

    def sum_input_gradient(self, params, dy):
        return _call(params, "sum_pool_input_gradient", dy=dy)


def _call(params: PoolParams, handler: str, **arrays: jax.Array) -> jax.Array:
    """Calls a handler, for arrays with one outer axis and the channels last."""
    window, any_array = params.window, next(iter(arrays.values()))
    problem = params.problem(any_array)
    shapes = {"x": problem.shape, "y": window.y_shape(problem.shape)}
    result = shapes["x" if handler.endswith("input_gradient") else "y"]
    operands = [array.reshape(window.canonical(array.shape)) for array in arrays.values()]
    (found,) = ffi_call(
        f"jaxgrad_cpu_{handler}",
        [jax.ShapeDtypeStruct(window.canonical(result), problem.dtype)],
        operands,
        _workspace(handler, problem),
        named={name: jax.ShapeDtypeStruct(window.canonical(shape), problem.dtype) for name, shape in shapes.items()},
        **_attributes(window),
    )
    return found.reshape(result)


@cleared_lru_cache(4096)
def _workspace(handler: str, problem: PoolProblem) -> int:
    """The bytes of workspace of a call, for the threads of this machine."""
    window = problem.window
    return int(
        cpu.module.pool_workspace(
            _HANDLERS.index(handler),
            window.canonical(problem.shape),
            window.canonical(window.y_shape(problem.shape)),
            **_attributes(window),
            storage_bytes=problem.dtype.itemsize,
        )
    )


def _attributes(window: Window) -> dict[str, tuple[int, ...]]:
    return {
        "window": window.shape,
        "strides": window.strides,
        "padding": tuple(size for pair in window.padding for size in pair),
        "dilation": window.dilation,
    }
