"""The CUDA kernels of the norms, emulated on the CPU by one block. No GPU is needed."""

from __future__ import annotations

import ctypes
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_module import NEEDS_CUDA_MODULE
from thorough import thorough_after

from jaxgrad._src.native import cuda

pytestmark = NEEDS_CUDA_MODULE

_PASSES = ("forward", "statistics", "normalize", "backward")
_ACTIVATIONS = (lambda z: z, jax.nn.relu, jax.nn.silu, jax.nn.gelu)
_SHARED_BYTES = 227 << 10  # of an H200
_MARGIN = 64  # elements on both sides of an array, which no kernel may write
_ARRAYS = (  # of NormArrays
    *("x", "residual", "y", "dy", "result", "dresidual", "scale", "bias", "given_mean", "given_mean_low", "given_rstd"),
    *("mean", "mean_low", "var", "rstd", "dmean", "dvar", "dscale", "dbias"),
)
_MAIN = """
static ARGUMENTS argument;

extern "C" void run(const void* from, const void* given, const char* const* bounds, int count, char* workspace,
                    const int64_t* offsets, float epsilon, unsigned blocks, unsigned threads, size_t shared) {
  memcpy(&argument, from, sizeof argument);
  memcpy(&argument.arrays, given, sizeof argument.arrays);
  argument.partials = reinterpret_cast<float*>(workspace + offsets[0]);
#if HAS_COLUMNS
  argument.sums = reinterpret_cast<float*>(workspace + offsets[1]);
#endif
  argument.flags = reinterpret_cast<uint64*>(workspace + offsets[2]);
  argument.nonce = 0x123456789abcdef0;
  argument.epsilon = epsilon;
  arrays.clear();
  for (int i = 0; i < count; ++i) arrays.push_back({bounds[2 * i], bounds[2 * i + 1]});
  launch(blocks, 1, threads, shared, [] { KERNEL(argument); });
}
"""


class _Norm:
    """Kernels of one problem: sizes S, O, C, I, G and K."""

    def __init__(
        self,
        folder: Path,
        emulation: Path,
        shared_bytes: int,
        sizes: tuple[int, ...],
        dtype: str,
        activation: int,
        **key: bool,
    ):
        self.folder, self.emulation, self.sizes, self.dtype = folder, emulation, sizes, np.dtype(jnp.dtype(dtype))
        self.shared_bytes = shared_bytes
        self.activation, self.key = activation, key
        self.libraries: dict[str, Any] = {}

    def run(
        self, name: str, given: dict[str, np.ndarray], results: dict[str, tuple[int, ...]], **key: Any
    ) -> dict[str, Any]:
        key = {
            "centered": True,
            "frozen": False,
            "residual": False,
            "third": 0,
            "needs_dx": True,
            "needs_sums": True,
            **self.key,
            **key,
        }
        is_rows = self.sizes[1] == self.sizes[3] == self.sizes[4] == 1 and name in ("forward", "backward")
        program = cuda.module.norm_program(
            0 if is_rows and not key["frozen"] else 1,
            self.shared_bytes,
            _PASSES.index(name),
            cuda.float_type(self.dtype),
            list(self.sizes),
            self.activation,
            *key.values(),
        )
        assert not program["cooperative"] or program["blocks"] == 1
        like_x = ("x", "residual", "y", "dy", "result", "dresidual")
        buffers = {}
        for each, shape in results.items():
            buffers[each] = np.full(2 * _MARGIN + int(np.prod(shape)), 99, self.dtype if each in like_x else np.float32)
        inside = {each: buffer[_MARGIN : len(buffer) - _MARGIN] for each, buffer in buffers.items()}
        assert all(array.ctypes.data % 16 == 0 for array in inside.values())
        operands = {each: np.ascontiguousarray(array) for each, array in given.items()}
        pointers = (ctypes.c_void_p * len(_ARRAYS))(
            *(
                operands[each].ctypes.data if each in operands else inside[each].ctypes.data if each in inside else None
                for each in _ARRAYS
            )
        )
        readable = [*operands.values(), *inside.values()]
        bounds = (ctypes.c_void_p * (2 * len(readable)))(
            *(end for array in readable for end in (array.ctypes.data, array.ctypes.data + array.nbytes))
        )
        workspace = np.full(program["workspace_bytes"] + _MARGIN, 0xA5, np.uint8)
        offsets = (ctypes.c_int64 * 3)(*program["offsets"])
        self._library(program).run(
            program["arguments"],
            pointers,
            bounds,
            len(readable),
            ctypes.c_void_p(workspace.ctypes.data),
            offsets,
            ctypes.c_float(1e-5),
            program["blocks"],
            program["threads"],
            ctypes.c_size_t(program["shared_bytes"]),
        )
        assert (workspace[program["workspace_bytes"] :] == 0xA5).all()
        for buffer in buffers.values():
            assert (buffer[:_MARGIN] == 99).all()
            assert (buffer[len(buffer) - _MARGIN :] == 99).all()
        return {each: inside[each].reshape(shape) for each, shape in results.items()}

    def _library(self, program: dict[str, Any]) -> Any:
        text = program["definitions"] + program["source"]
        if text not in self.libraries:
            kernel = program["kernel"]
            has_columns = "columns" in kernel
            source = self.folder / f"kernel{len(self.libraries)}.cc"
            source.write_text(
                f'{program["definitions"]}#include "{self.emulation}"\n'
                f'#include "{self.emulation.with_name("norm_emulation.h")}"\n{program["source"]}\n'
                f"#define KERNEL {kernel}\n#define HAS_COLUMNS {int(has_columns)}\n"
                f"#define ARGUMENTS {'NormColumns' if has_columns else 'NormRows'}\n{_MAIN}"
            )
            library = source.with_suffix(".so")
            command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-o", library, source]
            subprocess.run(command, check=True)
            self.libraries[text] = ctypes.CDLL(str(library))
        return self.libraries[text]


def _reference(sizes, activation, centered, x, scale, bias, residual):
    """(y, mean, var) in float64, with x as [S, O, C, I] and scale as [K, C]."""
    samples, _, channels, inner, groups, calls = sizes
    of_groups = x.reshape(samples, -1, groups, channels // groups, inner)
    mean = of_groups.mean((1, 3, 4), keepdims=True) if centered else jnp.zeros((samples, 1, groups, 1, 1))
    var = jnp.square(of_groups - mean).mean((1, 3, 4), keepdims=True)
    xhat = ((of_groups - mean) / jnp.sqrt(var + 1e-5)).reshape(x.shape)
    scale, bias = (jnp.repeat(each, samples // calls, 0)[:, None, :, None] for each in (scale, bias))
    y = _ACTIVATIONS[activation](xhat * scale + bias + residual)
    return y, mean.reshape(samples, groups), var.reshape(samples, groups)


_CASES = {
    "batch, residual, items that are read again": ((1, 3000, 16, 1, 16, 1), "float32", 1, True, True, 24 << 10),
    "batch, channels first": ((1, 3, 5, 24, 5, 1), "bfloat16", 2, True, True),
    "group, several samples": ((4, 50, 40, 1, 4, 2), "bfloat16", 2, True, False),
    "layer, residual, several rounds": ((300, 1, 100, 1, 1, 2), "float32", 2, True, True),
    "batch": ((1, 75, 24, 1, 24, 1), "bfloat16", 1, True, False),
    "group, items that are read again": ((1, 2700, 16, 1, 4, 1), "float32", 3, True, False, 24 << 10),
    "batch, items in shared memory": ((1, 1500, 16, 1, 16, 1), "float32", 0, True, False),
    "batch, odd channels": ((2, 31, 7, 1, 7, 2), "float16", 0, True, False),
    "group, channels first": ((2, 1, 12, 40, 3, 1), "float32", 3, True, False),
    "layer": ((24, 1, 96, 1, 1, 1), "bfloat16", 0, True, False),
    "layer, odd width": ((600, 1, 31, 1, 1, 1), "float16", 0, True, False),
    "layer, little shared memory": ((70, 1, 640, 1, 1, 1), "float32", 2, True, True, 25 << 10),
    "rms, rows of three warps": ((7, 1, 768, 1, 1, 1), "bfloat16", 3, False, False),
}


@pytest.mark.parametrize("case", thorough_after(4, [*_CASES]))
def test_values_and_gradients(tmp_path, kernel_emulation, case):
    """Of all passes, and of the gradients alone that need fewer sums, against float64."""
    sizes, dtype, activation, centered, has_residual, *shared_bytes = _CASES[case]
    *shape, groups, calls = sizes
    samples, channels = shape[0], shape[2]
    has_rows, has_batch = shape[1] == shape[3] == groups == 1, groups == channels
    shapes = dict.fromkeys(("result", "dresidual"), shape) | dict.fromkeys(("dscale", "dbias"), (calls, channels))
    norm = _Norm(
        tmp_path, kernel_emulation, *(shared_bytes or [_SHARED_BYTES]), sizes, dtype, activation, centered=centered
    )
    rng = np.random.default_rng(3)

    def draw(size=shape, dtype=norm.dtype):
        return np.asarray(jnp.asarray(rng.standard_normal(size), dtype))

    def per_group():
        return draw((samples, groups), np.float32) if has_batch else np.zeros((samples, groups), np.float32)

    x, dy, residual = draw() + norm.dtype.type(3), draw(), draw() if has_residual else None
    scale, bias = (1 + draw((calls, channels), np.float32) / 4 for _ in range(2))
    dmean, dvar = per_group() * centered, per_group()
    with jax.enable_x64(True):
        arrays = (x, scale, bias, np.zeros(shape) if residual is None else residual)
        wide = [jnp.asarray(np.asarray(array, np.float64)) for array in arrays]
        (y, mean, var), pullback = jax.vjp(partial(_reference, sizes, activation, centered), *wide)
        expected = pullback(tuple(jnp.asarray(np.asarray(each, np.float64)) for each in (dy, dmean, dvar)))
    expected = dict(zip(("result", "dscale", "dbias", "dresidual"), expected, strict=True))
    tolerance = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-5}[dtype]

    def close(a, b, factor=1.0):
        a, b = (np.asarray(each, np.float64) for each in (a, b))
        assert np.abs(a - b).max() <= factor * tolerance * (np.abs(b).max() + 0.1)

    operands = {"x": x, "scale": scale, "bias": bias} | ({"residual": residual} if has_residual else {})
    statistics = dict.fromkeys(["mean", "mean_low"] * centered + ["var", "rstd"], (samples, groups))
    found = norm.run("forward", operands, {"result": shape} | statistics, residual=has_residual)
    close(found["result"], y)
    np.testing.assert_allclose(found["var"], var, rtol=1e-4)
    if centered:
        np.testing.assert_allclose(found["mean"] + found["mean_low"], mean, rtol=1e-5)
    if not has_rows:
        for name, values in norm.run("statistics", {"x": x}, statistics).items():
            np.testing.assert_allclose(values, found[name], rtol=1e-6, atol=1e-6)  # sums in another order
    given = {f"given_{name}": found[name] for name in statistics if name != "var"}
    close(norm.run("normalize", operands | given, {"result": shape}, residual=has_residual)["result"], found["result"])

    third = (0, 1, 2, 2)[activation] if has_residual else 0
    given |= {"x": x, "dy": dy, "scale": scale, "bias": bias} | ({"y": found["result"]} if third == 1 else {})
    given |= {"residual": residual} if third == 2 else {}
    of_statistics = {"dmean": dmean, "dvar": dvar} if has_batch else {}
    last = ["dresidual"] if third else []
    for wanted in filter(None, (["result", "dscale", "dbias", *last], ["result"], ["dscale"], last)):
        key = {"residual": "dresidual" in wanted, "needs_dx": "result" in wanted, "needs_sums": "dscale" in wanted}
        results = {name: shapes[name] for name in wanted}
        for name, gradient in norm.run("backward", given | of_statistics, results, third=third, **key).items():
            close(gradient, expected[name], 4)
    if has_batch and activation == 0:
        results = {name: shapes[name] for name in ("result", "dbias")}
        gradients = norm.run("backward", given, results, frozen=True)
        close(gradients["result"], dy * (found["rstd"] * np.repeat(scale, samples // calls, 0))[:, None, :, None], 2)
        close(gradients["dbias"], expected["dbias"], 2)


@pytest.mark.parametrize("shared_bytes", [99 << 10, 163 << 10, _SHARED_BYTES])
def test_programs_fit_shared_memory(shared_bytes):
    """Of rows, beside the variables of the kernels: 272 bytes for each warp."""
    fitting = 0
    for width in [*range(2, 1100, 7), *range(1100, 20000, 61), *range(9850, 9925)]:
        for dtype in ("float32", "bfloat16"):
            for name, third in (("forward", 0), ("backward", 0), ("backward", 1)):
                key = (1, True, False, bool(third), third, True, True)
                arguments = (_PASSES.index(name), cuda.float_type(np.dtype(jnp.dtype(dtype))), [64, 1, width, 1, 1, 1])
                try:
                    program = cuda.module.norm_program(132, shared_bytes, *arguments, *key)
                except RuntimeError as error:
                    assert "do not fit the shared memory" in str(error)  # noqa: PT017
                    continue
                fitting += 1
                assert program["shared_bytes"] + program["threads"] // 32 * 272 <= shared_bytes
    assert fitting > 2000


@pytest.mark.parametrize("sizes", [(0, 1, 8, 1, 1, 1), (2, 0, 8, 3, 4, 1), (2, 3, 8, 0, 8, 1), (2, 1, 0, 1, 1, 1)])
@pytest.mark.parametrize("name", _PASSES)
def test_empty_arrays_are_rejected(sizes, name):
    """XLA runs them, see passes.py."""
    key = (1, True, False, False, 0, True, True)
    arguments = (_PASSES.index(name), cuda.float_type(np.dtype("float32")), list(sizes), *key)
    assert "no empty arrays" in cuda.module.norm_rejection(-1, *arguments)
    with pytest.raises(RuntimeError, match="no empty arrays"):
        cuda.module.norm_workspace(-1, *arguments)


def test_a_forced_call_of_empty_arrays_runs_on_xla(on_fake_cuda):
    """Where there is a GPU, all of whose kernels reject them."""
    found = on_fake_cuda("""
from fake_gpu import *
shapes = []
for shape in ((0, 3, 6), (2, 0, 6), (2, 3, 0)):
    x = jnp.zeros(shape, jnp.float32)
    def norms(x):
        each = jnp.ones(shape[-1], jnp.float32)
        settings = {"residual": x, "activation": "relu", "implementation": "cuda"}
        rows = jaxgrad.layer_norm(x, each, each, **settings)
        y = jaxgrad.group_norm(rows, each, each, num_groups=2, **settings)
        return jaxgrad.batch_norm_training(y, each, each, **settings)[0].sum()
    shapes.append(jax.grad(norms)(x).shape)
report(shapes=shapes)
""")
    assert found["shapes"] == [[0, 3, 6], [2, 0, 6], [2, 3, 0]]


def test_rows_whose_scale_is_read_again(tmp_path, kernel_emulation):
    """The forward pass over rows that are too wide to keep scale and bias in registers."""
    sizes = (3, 1, 17000, 1, 1, 1)
    norm = _Norm(tmp_path, kernel_emulation, _SHARED_BYTES, sizes, "float32", 0)
    rng = np.random.default_rng(5)
    x = (rng.standard_normal(sizes[:4]) + 3).astype(np.float32)
    scale, bias = rng.standard_normal((2, 1, 17000)).astype(np.float32)
    statistics = dict.fromkeys(["mean", "mean_low", "var", "rstd"], (3, 1))
    found = norm.run("forward", {"x": x, "scale": scale, "bias": bias}, {"result": sizes[:4], **statistics})
    y, _, var = _reference(sizes, 0, True, *(a.astype(np.float64) for a in (x, scale, bias, np.zeros(sizes[:4]))))
    np.testing.assert_allclose(found["result"], y, rtol=0, atol=2e-5)
    np.testing.assert_allclose(found["var"], var, rtol=1e-5)


def test_constant_rows_of_large_numbers(tmp_path, kernel_emulation):
    """Gradients are finite where mean / sqrt(var + epsilon) is not."""
    sizes, shape = (2, 1, 100, 1, 1, 1), (2, 1, 100, 1)
    norm = _Norm(tmp_path, kernel_emulation, _SHARED_BYTES, sizes, "float32", 0)
    dy = np.random.default_rng(7).standard_normal(shape).astype(np.float32)
    ones, zeros, rstd = np.ones((1, 100), np.float32), np.zeros((2, 1), np.float32), np.full((2, 1), 1e-5**-0.5, "f4")
    mean = np.full((2, 1), 1e37, np.float32)
    given = {"x": np.full(shape, 1e37, np.float32), "dy": dy, "scale": ones, "bias": ones}
    given |= {"given_mean": mean, "given_mean_low": zeros, "given_rstd": rstd}
    found = norm.run("backward", given, {"result": shape, "dscale": (1, 100), "dbias": (1, 100)})
    np.testing.assert_allclose(found["result"], (dy - dy.mean(2, keepdims=True)) * 1e-5**-0.5, rtol=0, atol=1e-3)
    np.testing.assert_array_equal(found["dscale"], 0)
