"""The CPU backend of pooling: jaxgrad's C++ kernels in ffi/cpu/pool.

The kernels add to dx in the order of the windows and round each sum to the dtype of x, as XLA does, so that results
have the same bits and do not depend on the number of threads.
"""

from __future__ import annotations

import jax

from jaxgrad._src.choice.op import Rejection
from jaxgrad._src.core.jax_internals import cleared_lru_cache
from jaxgrad._src.native import cpu
from jaxgrad._src.native.ffi import ffi_call
from jaxgrad._src.pool.backend import PASSES, PoolBackend
from jaxgrad._src.pool.params import PoolProblem, Window

_MAX_AXES = 3


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
            _workspace(pass_name, call)
        except ValueError as error:  # sizes near 2^62
            return Rejection(f"the CPU kernels take smaller sizes: {error}")
        return None

    def forward(self, window, x):
        return _call("forward", window, x)

    def input_gradient(self, window, x, dy):
        return _call("input_gradient", window, x, dy=dy)

    def tangent(self, window, x, dx):
        return _call("tangent", window, x, dx=dx)


def _call(pass_name: str, window: Window, x: jax.Array, **second: jax.Array) -> jax.Array:
    """Calls a handler, for arrays with one outer axis and the channels last."""
    x_shape, y_shape = x.shape, window.y_shape(x.shape)
    workspace = _workspace(pass_name, PoolProblem.of(x, window))
    operands = {name: array.reshape(window.canonical(array.shape)) for name, array in {"x": x, **second}.items()}
    x = operands["x"]
    y = jax.ShapeDtypeStruct(window.canonical(y_shape), x.dtype)
    is_like_x = pass_name == "input_gradient"
    (found,) = ffi_call(
        f"jaxgrad_cpu_max_pool_{pass_name}",
        [jax.ShapeDtypeStruct(x.shape, x.dtype) if is_like_x else y],
        tuple(operands.values()),
        workspace,
        named={"x": x, "y": y},
        **_attributes(window),
    )
    return found.reshape(x_shape if is_like_x else y_shape)


@cleared_lru_cache(4096)
def _workspace(pass_name: str, problem: PoolProblem) -> int:
    """The bytes of workspace of a call, for the threads of this machine."""
    window = problem.window
    return int(
        cpu.module.pool_workspace(
            PASSES.index(pass_name),
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
