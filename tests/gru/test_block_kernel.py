"""The GRU's CUDA kernels for single blocks, emulated on the CPU. No GPU is needed."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import gru_references
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_module import NEEDS_CUDA_MODULE
from gru_cases import Case, Cotangents, fill_padding, make_inputs
from tolerances import EPS

from jaxgrad._src.native import cuda

pytestmark = NEEDS_CUDA_MODULE

_EMULATION = Path(__file__).parents[1] / "gru_emulation.h"
# The arrays of GruArguments, in its order: operands, then results.
_OPERANDS = ("inputs", "r", "b", "initial_h", "lengths", "reset", "reset_h")
_RESULTS = ("y", "y_h", "gates", "dy", "dy_h", "dgates", "recurrent_dgates", "dh0", "dreset_h")
_MAIN = """
static GruArguments arguments;

extern "C" void run(const int* sizes, float clip, void** pointers, const long long* bytes, int blocks, int threads,
                    int shared) {
  arrays.clear();
  for (int i = 0; i < 16; ++i) {
    const char* const from = static_cast<const char*>(pointers[i]);
    if (from != nullptr) arrays.push_back({from, from + bytes[i]});
  }
  GruArguments& a = arguments;
  a.steps = sizes[0], a.rows = sizes[1], a.hidden = sizes[2], a.directions = sizes[3], a.reversed = sizes[4];
  a.problems = sizes[5], a.tiles = sizes[6];
  a.clip = clip;
  a.inputs = static_cast<const float*>(pointers[0]);
  a.r = pointers[1], a.bias = pointers[2], a.initial_h = pointers[3];
  a.lengths = static_cast<const int*>(pointers[4]);
  a.reset = static_cast<const unsigned char*>(pointers[5]);
  a.reset_h = pointers[6], a.y = pointers[7], a.y_h = pointers[8], a.gates = pointers[9];
  a.dy = pointers[10], a.dy_h = pointers[11], a.dgates = pointers[12], a.recurrent_dgates = pointers[13];
  a.dh0 = static_cast<float*>(pointers[14]), a.dreset_h = static_cast<float*>(pointers[15]);
  launch(blocks, 1, threads, shared, [] { KERNEL(arguments); });
}
"""
_REVERSED = {"forward": 0, "reverse": 1, "bidirectional": 2}


def _run(case, dtype, rows_of_block, is_backward, arrays, folder, kernel_emulation):
    name = "gru_backward" if is_backward else "gru_forward"
    settings = case.linear_before_reset, case.D, case.B, case.H, case.sequence_lens, case.reset
    dtype = cuda.float_type(jnp.dtype(dtype))
    program = cuda.module.gru_block_program(is_backward, dtype, *settings, rows_of_block)
    source, library = folder / f"{name}.cc", folder / f"{name}.so"
    headers = f'#include "{kernel_emulation}"\n#include "{_EMULATION}"\n'
    source.write_text(f"{program['definitions']}#define KERNEL {name}\n{headers}{program['source']}{_MAIN}")
    subprocess.run(["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", source, "-o", library], check=True)
    every = [arrays[name] for name in (*_OPERANDS, *_RESULTS)]
    pointers = (ctypes.c_void_p * 16)(*[None if a is None else a.ctypes.data for a in every])
    sizes = (ctypes.c_int * 7)(case.T, case.B, case.H, case.D, _REVERSED[case.direction], case.D, program["tiles"])
    count = (ctypes.c_longlong * 16)(*[0 if a is None else a.nbytes for a in every])
    clip = ctypes.c_float(np.inf if case.clip is None else case.clip)
    grid = program["blocks"], program["threads"], program["shared_bytes"]
    ctypes.CDLL(str(library)).run(sizes, clip, pointers, count, *grid)


# The rows of a block, and calls whose hidden units and rows do not fill the blocks.
_CALLS = {
    "one row": (1, Case(T=5, B=3, H=43, direction="bidirectional", linear_before_reset=True)),
    "one row, before": (1, Case(T=4, B=2, H=64, direction="reverse")),
    "96 units": (1, Case(T=4, B=2, H=90, linear_before_reset=True, clip=0.6)),
    "96 units, before": (2, Case(T=3, B=3, H=96, direction="reverse", clip=0.6)),
    "two rows": (2, Case(T=4, B=5, H=90, direction="bidirectional")),
    "two rows, linear": (2, Case(T=6, B=4, H=31, linear_before_reset=True)),
    "four rows": (4, Case(T=4, B=6, H=17, linear_before_reset=True)),
    "four rows, before": (4, Case(T=5, B=9, H=60, direction="bidirectional")),
    "four rows, 64 units": (4, Case(T=3, B=4, H=64, direction="reverse", linear_before_reset=True)),
    "no options": (2, Case(T=4, B=3, H=20, linear_before_reset=True).bare()),
    "no options, before": (1, Case(T=4, B=3, H=33).bare()),
    "long": (1, Case(T=30, B=1, H=5, linear_before_reset=True)),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", _CALLS)
def test_emulated_kernels_match_the_reference(name, dtype, tmp_path, kernel_emulation):
    """The input weights are the identity, so that the gradient of x is that of the pre-activations."""
    rows_of_block, case = _CALLS[name]
    T, B, H, D = case.T, case.B, case.H, case.D
    case = case.replace(I=3 * H)
    inputs, cotangents = make_inputs(case, dtype)
    identity = np.broadcast_to(np.eye(3 * H), (D, 3 * H, 3 * H)).astype(inputs.w.dtype)
    inputs = inputs._replace(w=identity)
    x = np.asarray(fill_padding(inputs, np.nan).x, np.float32)
    wide = {"dgates": (T, B, D, 3, H), "recurrent_dgates": (T, B, D, 3, H), "y": (T, D, B, H), "y_h": (D, B, H)}
    wide["gates"] = (T, D, B, 3 + case.linear_before_reset, H)
    arrays = {name: np.full(shape, -9, inputs.r.dtype) for name, shape in wide.items()}
    if not case.linear_before_reset:
        arrays["recurrent_dgates"] = None
    arrays |= {
        "inputs": np.ascontiguousarray(np.broadcast_to(x[:, :, None], (T, B, D, 3 * H))),
        "r": inputs.r,
        "b": inputs.b,
        "initial_h": inputs.initial_h,
        "lengths": inputs.sequence_lens,
        "reset": inputs.reset,
        "reset_h": inputs.reset_h,
        "dy": cotangents.y,
        "dy_h": cotangents.y_h,
        "dh0": np.full((D, B, H), -9, np.float32),
        "dreset_h": np.full((D, B, H), -9, np.float32) if case.reset_h else None,
    }
    for is_backward in (False, True):
        _run(case, dtype, rows_of_block, is_backward, arrays, tmp_path, kernel_emulation)
    y, y_h, gradients = gru_references.values_and_gradients(
        inputs._replace(initial_h=np.zeros((D, B, H)) if inputs.initial_h is None else inputs.initial_h),
        Cotangents(*cotangents),
        **case.settings,
    )

    def check(what, found, expected):
        tolerance = 60 * EPS[dtype] * max(1, np.abs(expected).max())
        np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=0, atol=tolerance, err_msg=what)

    check("y", arrays["y"], y)
    check("y_h", arrays["y_h"], y_h)
    dgates = arrays["dgates"].astype(np.float64).reshape(T, B, D, 3 * H)
    check("dgates", dgates.sum(2), gradients.x)
    check("dh0", arrays["dh0"], gradients.initial_h)
    if inputs.reset_h is not None:
        check("dreset_h", arrays["dreset_h"], gradients.reset_h)
    if inputs.b is not None:
        check("dgates of each direction", dgates.sum((0, 1)), gradients.b[:, : 3 * H])
        if arrays["recurrent_dgates"] is not None:
            recurrent = arrays["recurrent_dgates"].astype(np.float64).sum((0, 1)).reshape(D, 3 * H)
            check("recurrent dgates of each direction", recurrent, gradients.b[:, 3 * H :])
