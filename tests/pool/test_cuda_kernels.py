"""The CUDA kernels of pooling, emulated on the CPU. No GPU is needed."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_module import NEEDS_CUDA_MODULE
from pool_cases import CASES, PoolCase, assert_same_bits, make_inputs, random_case, value_and_gradient
from thorough import thorough_after
from tolerances import input_dtype

import jaxgrad
from jaxgrad._src.native import cuda
from jaxgrad._src.pool.handlers import _PASSES, attributes, shapes
from jaxgrad._src.pool.params import PoolProblem, Window

pytestmark = NEEDS_CUDA_MODULE

_DIVISOR = 3
_MARGIN = 64  # elements on both sides of an array, which no kernel may write
_MAIN = """
static PoolArguments argument;
static void* given[3];

template <class A, class B>
static void play(void (*kernel)(A, B, PoolArguments)) {
  kernel((A)given[0], (B)given[1], argument);
}
template <class A, class B, class C>
static void play(void (*kernel)(A, B, C, PoolArguments)) {
  kernel((A)given[0], (B)given[1], (C)given[2], argument);
}

#define RUN(NAME)                                                                                          \\
  extern "C" void run_##NAME(const void* from, void* first, void* second, void* third, unsigned blocks) { \\
    memcpy(&argument, from, sizeof argument);                                                              \\
    given[0] = first, given[1] = second, given[2] = third;                                                 \\
    launch(blocks, 1, kPoolThreads, 0, [] { play(NAME); });                                                \\
  }
"""


def _problem(case: PoolCase, dtype: str) -> PoolProblem:
    window = Window(case.window, case.strides, case.padding, case.dilation, case.channels_last)
    shape = case.shape if case.batch else (1, *case.shape)
    return PoolProblem("max_pool", shape, input_dtype(dtype), window)


class _Kernels:
    """The kernels of a problem, compiled for the CPU."""

    def __init__(self, problem: PoolProblem, folder: Path, kernel_emulation: Path):
        self.problem, self.folder, self.emulation = problem, folder, kernel_emulation
        self.libraries: dict[str, Any] = {}

    def run(self, name: str, operands: list[np.ndarray], result_shape: tuple[int, ...]) -> np.ndarray:
        number, dtype = _PASSES.index(name), self.problem.dtype
        program = cuda.module.pool_program(
            number, cuda.float_type(dtype), *shapes(self.problem), **attributes(self.problem), divisor=_DIVISOR
        )
        library = self._library(name, program)
        result = np.full(2 * _MARGIN + int(np.prod(result_shape)), 99, dtype)
        inside = result[_MARGIN : _MARGIN + int(np.prod(result_shape))]
        workspace = np.zeros(program["workspace_bytes"] + 64, np.uint8)
        given = [np.ascontiguousarray(operand) for operand in operands]
        for kernel, arguments, blocks in program["launches"]:
            arrays = {"max_pool_select": [given[0], workspace], "max_pool_gather": [workspace, given[-1], inside]}
            used = arrays.get(kernel, [*given, inside])
            pointers = [ctypes.c_void_p(array.ctypes.data) for array in used]
            pointers += [ctypes.c_void_p()] * (3 - len(pointers))
            getattr(library, f"run_{kernel}")(arguments, *pointers, ctypes.c_uint(blocks))
        assert (result[:_MARGIN] == 99).all()
        assert (result[len(result) - _MARGIN :] == 99).all()
        return inside.reshape(result_shape)

    def _library(self, name: str, program: dict[str, Any]) -> Any:
        if name not in self.libraries:
            source = f'{program["definitions"]}#include "{self.emulation}"\n{program["source"]}{_MAIN}'
            source += "".join(f"RUN({kernel})\n" for kernel, _, _ in program["launches"])
            (self.folder / f"{name}.cc").write_text(source)
            path = self.folder / f"{name}.so"
            flags = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC"]
            subprocess.run(["g++", *flags, self.folder / f"{name}.cc", "-o", path], check=True)
            self.libraries[name] = ctypes.CDLL(str(path))
        return self.libraries[name]


_CALLS = [
    *((CASES[i], dtype) for i, dtype in ((0, "float32"), (1, "bfloat16"), (4, "float64"), (7, "float16"))),
    (PoolCase(batch=(1,), spatial=(20, 19), window=(17, 16), channels=8, strides=(1, 1)), "bfloat16"),  # 272 taps
    (PoolCase(channels=12, dilation=(2, 1), padding=((2, 1), (1, 1))), "float32"),
    (PoolCase(channels=40), "bfloat16"),
    *((CASES[i], "float32") for i in (5, 10)),
    *((random_case(seed, dilated=seed % 2 == 0), "float32") for seed in range(6)),
]


@pytest.mark.parametrize(("case", "dtype"), thorough_after(6, _CALLS, several=True), ids=str)
def test_emulated_kernels_match_the_cpu_kernels(case, dtype, tmp_path, kernel_emulation):
    """Maxima and selections have the same bits. Sums are float32, and rounded once."""
    problem = _problem(case, dtype)
    if not np.prod(problem.window.y_shape(problem.shape)):
        pytest.skip("no window")
    kernels = _Kernels(problem, tmp_path, kernel_emulation)
    x, dy = make_inputs(case, dtype, special=dtype != "float16")  # the emulation rounds finite numbers to float16
    y_shape = dy.shape
    dx = np.arange(x.size).reshape(x.shape).astype(x.dtype)
    op = case.op(implementation="cpu")
    y, gradient = value_and_gradient(op, x, dy)
    assert_same_bits(kernels.run("max_pool_forward", [x], y_shape), y)
    with jaxgrad.forward_mode():
        _, tangent = jax.jvp(op, (x,), (dx,))
    assert_same_bits(kernels.run("max_pool_tangent", [x, dx], y_shape), tangent)
    found = kernels.run("max_pool_input_gradient", [x, dy], x.shape)
    _close(found, gradient, 8)
    finite, _ = make_inputs(case, dtype, special=False)
    factor = float(np.prod(case.window) / _DIVISOR)
    y, gradient = value_and_gradient(lambda x: jaxgrad.avg_pool(x, **op.keywords) * factor, finite, dy)
    _close(kernels.run("sum_pool_forward", [finite], y_shape), y, 8)
    _close(kernels.run("sum_pool_input_gradient", [dy], x.shape), gradient, 8)


def _close(found: Any, expected: Any, factor: float) -> None:
    eps = float(jnp.finfo(found.dtype).eps)
    found, expected = (np.asarray(a, np.float64) for a in (found, expected))
    np.testing.assert_allclose(found, expected, rtol=0, atol=factor * eps * max(1, np.abs(expected).max(initial=0)))


def test_rejections():
    call = PoolCase(batch=(1,), spatial=(300, 300), window=(256, 256), strides=(1, 1))
    problem = _problem(call, "float32")
    reason = cuda.module.pool_rejection(0, 0, *shapes(problem), **attributes(problem), divisor=1)
    assert reason == "the pooling kernels take windows of fewer than 65535 elements"
    problem = _problem(PoolCase(batch=(1 << 20,), spatial=(64, 64)), "float32")
    reason = cuda.module.pool_rejection(0, 0, *shapes(problem), **attributes(problem), divisor=1)
    assert reason == "the pooling kernels take arrays of fewer than 2^31 elements"
