"""For scripts of the fixture `on_fake_cuda`: the CUDA module runs in programs for the CPU, on the fakes of fake_cuda.c.

Importing this module makes jaxgrad take the CPU for a GPU. cuDNN's convolutions are computed, and so are the reference
kernels. Other CUDA kernels of jaxgrad are not: use layouts in which cuDNN writes weight gradients without a transpose.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cuda_on_cpu import register
from script_results import outcome as outcome
from script_results import report as report

import jaxgrad
from jaxgrad._src.conv.call.geometry import ConvGeometry
from jaxgrad._src.conv.call.problem import ConvProblem
from jaxgrad._src.conv.kernels.cudnn_plan import cudnn_plan
from jaxgrad._src.native import cuda

fake: Any = ctypes.CDLL("libcuda.so.1")
calls: Any = ctypes.CDLL("libfake_gpu_calls.so")
fake.fake_fail.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int]
fake.fake_engine.restype = ctypes.c_long
fake.fake_waiting.argtypes = fake.fake_freeing.argtypes = [ctypes.c_double]
calls.fake_scratch_bytes.restype = ctypes.c_size_t
calls.fake_scratch_limit.argtypes = [ctypes.c_size_t]

LAYOUT = ("NHWC", "OHWI", "NHWC")
SETTINGS: dict[str, Any] = {
    "window_strides": (2, 1),
    "padding": ((2, 0), (1, 1)),
    "rhs_dilation": (1, 2),
    "dimension_numbers": LAYOUT,
    "feature_group_count": 2,
}
_rng = np.random.default_rng(0)
_sizes = itertools.count(9)


register(calls)


def fail(function: str | None, n: int = 0, status: int = 0) -> None:
    """From now on the n-th call of a function fails, or each call with n = 0."""
    fake.fake_fail(function and function.encode(), n, status)


def new_size() -> int:
    """A size whose plans are in no cache."""
    return next(_sizes)


def engine(size: int, search: str = "exhaustive") -> list[Any] | None:
    """The engine of a forward pass and its workspace; None if cuDNN does not support it."""
    spec = (0, 3, 1, 2)
    geometry = ConvGeometry(spec, (0, 3, 1, 2), spec, (1, 1), ((2, 0), (2, 0)), (1, 1), 1, (size, 8), (3, 3))
    with jaxgrad.config.override(search=search):
        problem = ConvProblem(geometry, 2, 4, 4, jnp.dtype("float32"))
        plan = cudnn_plan("forward", problem, True, jaxgrad.config.current())
    return None if plan is None else [plan.engine, plan.workspace]


class Step:
    """The gradients of a convolution of its own size, compiled, and whether they are right."""

    def __init__(self, *, planned: bool = True, gradients: bool = True):
        """planned: plans are made while the program is lowered, otherwise when it runs, as if there were no GPU."""
        self.x = _rng.standard_normal((2, new_size(), 8, 4)).astype(np.float32)
        self.w = _rng.standard_normal((6, 3, 2, 2)).astype(np.float32)
        cuda.gpu_ordinal = lambda: 0 if planned else None
        self.compiled = self._step(jaxgrad.conv_general_dilated, gradients, implementation="cudnn").compile()
        cuda.gpu_ordinal = lambda: 0
        self.expected = self._step(jax.lax.conv_general_dilated, gradients).compile()(self.x, self.w)

    def _step(self, conv: Any, gradients: bool, **implementation: Any) -> Any:
        def value(x: jax.Array, w: jax.Array) -> jax.Array:
            return jnp.sum(jnp.sin(conv(x, w, **SETTINGS, **implementation)))

        return jax.jit(jax.value_and_grad(value, (0, 1)) if gradients else value).lower(self.x, self.w)

    def run(self) -> str:
        """Returns "right", or the error. Raises AssertionError for wrong values."""
        try:
            found = jax.block_until_ready(self.compiled(self.x, self.w))
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            return str(error)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(self.expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
        return "right"
