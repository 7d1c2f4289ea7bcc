"""The GRU's CUDA kernels for single blocks, emulated on the CPU. No GPU is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gru_references
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_module import NEEDS_CUDA_MODULE
from gru_cases import Case, fill_padding, is_padding, make_inputs
from thorough import one_in
from tolerances import EPS

from jaxgrad._src.native import cuda

pytestmark = NEEDS_CUDA_MODULE

_TESTS = Path(__file__).parents[1]
_EMULATIONS = "matrix_emulation.h", "gru_emulation.h"
# The arrays of GruArguments in its order, the operands of the forward pass first.
_ARRAYS = ("inputs", "r", "b", "initial_h", "lengths", "reset", "reset_h", "y", "y_h", "gates")
_ARRAYS += ("dy", "dy_h", "dgates", "recurrent_dgates", "dh0", "dreset_h")
_OPERANDS = (*_ARRAYS[:7], "dy", "dy_h")  # of the two passes, apart from results of the first
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


@pytest.fixture
def run(tmp_path, kernel_emulation):
    """Runs both passes on arrays [groups, ...], and returns all arrays."""

    def call(case, dtype, rows_of_block, on_tensor_cores, groups, is_backward):
        name = "gru_backward" if is_backward else "gru_forward"
        problems = groups * case.D
        settings = (
            case.linear_before_reset,
            problems,
            case.B,
            case.H,
            case.sequence_lens,
            case.reset,
            case.reset and case.reset_h,
            case.clip is not None,
            rows_of_block,
            on_tensor_cores,
        )
        program = cuda.module.gru_block_program(is_backward, cuda.float_type(jnp.dtype(dtype)), *settings)
        source, library = tmp_path / f"{name}.cc", tmp_path / f"{name}.so"
        headers = "".join(
            f'#include "{path}"\n' for path in (kernel_emulation, *(_TESTS / name for name in _EMULATIONS))
        )
        source.write_text(f"{program['definitions']}#define KERNEL {name}\n{headers}{program['source']}{_MAIN}")
        subprocess.run(["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", source, "-o", library], check=True)
        sizes = case.T, case.B, case.H, case.D, _REVERSED[case.direction], problems, program["tiles"]
        clip = float("inf") if case.clip is None else case.clip
        return str(library), sizes, clip, [program[key] for key in ("blocks", "threads", "shared_bytes")]

    def run(case, dtype, rows_of_block, arrays, on_tensor_cores=False):
        calls, stored = tmp_path / "calls.json", tmp_path / "arrays.npz"
        groups = arrays["r"].shape[0]
        calls.write_text(
            json.dumps([call(case, dtype, rows_of_block, on_tensor_cores, groups, back) for back in (False, True)])
        )
        found = []
        given = {name: np.ascontiguousarray(array) for name, array in arrays.items() if array is not None}
        for side in ("start", "end"):
            numbered = {str(_ARRAYS.index(name)): array.reshape(-1).view(np.uint8) for name, array in given.items()}
            np.savez(stored, **numbered)
            subprocess.run([sys.executable, _TESTS / "guarded_call.py", calls, stored, side], check=True, timeout=120)
            with np.load(stored) as bits:
                found.append({name: bits[str(_ARRAYS.index(name))] for name in given})
        for name in given:
            np.testing.assert_array_equal(*(arrays[name] for arrays in found), err_msg=name)
            if name in _OPERANDS:
                np.testing.assert_array_equal(found[0][name], given[name].reshape(-1).view(np.uint8), err_msg=name)
        return {name: found[0][name].view(array.dtype).reshape(array.shape) for name, array in given.items()}

    return run


def _arrays(case, inputs, cotangents):
    """The arrays of a group. The input weights are the identity: the gradient of x is that of the pre-activations."""
    T, B, H, D = case.T, case.B, case.H, case.D
    dtype = inputs.r.dtype

    def unwritten(*shape, dtype=dtype):
        return np.full(shape, -9, dtype)

    x = np.asarray(fill_padding(inputs, np.nan).x, np.float32)
    return {
        "inputs": np.broadcast_to(x[:, :, None], (T, B, D, 3 * H)),
        "r": inputs.r,
        "b": inputs.b,
        "initial_h": inputs.initial_h,
        "lengths": inputs.sequence_lens,
        "reset": inputs.reset,
        "reset_h": inputs.reset_h,
        "y": unwritten(T, D, B, H),
        "y_h": unwritten(D, B, H),
        "gates": unwritten(T, D, B, 3 + case.linear_before_reset, H),
        "dy": cotangents.y,
        "dy_h": cotangents.y_h,
        "dgates": unwritten(T, B, D, 3 * H),
        "recurrent_dgates": unwritten(T, B, D, 3 * H) if case.linear_before_reset else None,
        "dh0": unwritten(D, B, H, dtype=np.float32),
        "dreset_h": unwritten(D, B, H, dtype=np.float32) if inputs.reset_h is not None else None,
    }


def _stacked(groups):
    return {name: None if array is None else np.stack([g[name] for g in groups]) for name, array in groups[0].items()}


def _inputs(case, dtype):
    inputs, cotangents = make_inputs(case.replace(I=3 * case.H), dtype)
    identity = np.broadcast_to(np.eye(3 * case.H), (case.D, 3 * case.H, 3 * case.H))
    return inputs._replace(w=identity.astype(inputs.w.dtype)), cotangents


@pytest.mark.parametrize("on_tensor_cores", [False, True])
@pytest.mark.parametrize(("hidden", "is_filled"), [(31, 0), (32, 1), (43, 0), (101, 0), (128, 1)])
def test_the_compiler_knows_hidden_units_that_fill_the_blocks(hidden, is_filled, on_tensor_cores):
    settings = True, 1, 4, hidden, *[False] * 4, 8 if on_tensor_cores else 1, on_tensor_cores
    program = cuda.module.gru_block_program(False, cuda.float_type(jnp.dtype("bfloat16")), *settings)
    assert f"#define FILLED {is_filled}\n" in program["definitions"]


# The rows of a block, and calls. Most hidden units and rows do not fill the blocks. Each dtype runs some of them.
_CALLS = {
    "one row": (1, Case(T=5, B=3, H=43, direction="bidirectional", linear_before_reset=True)),
    "one row, before": (1, Case(T=4, B=2, H=64, direction="reverse")),
    "96 units": (1, Case(T=4, B=2, H=90, linear_before_reset=True, clip=0.6)),
    "96 units, before": (2, Case(T=3, B=3, H=96, direction="reverse", clip=0.6)),
    "128 units": (1, Case(T=4, B=2, H=128, direction="bidirectional", linear_before_reset=True)),
    "128 units, before": (1, Case(T=3, B=3, H=101, direction="reverse")),
    "two rows": (2, Case(T=4, B=5, H=90, direction="bidirectional")),
    "two rows, linear": (2, Case(T=6, B=4, H=64, direction="reverse", linear_before_reset=True)),
    "four rows": (4, Case(T=4, B=6, H=17, linear_before_reset=True)),
    "four rows, before": (4, Case(T=5, B=9, H=31, direction="bidirectional")),
    "resets to zero": (2, Case(T=6, B=5, H=90, direction="bidirectional", linear_before_reset=True, reset_h=False)),
    "resets to zero, before": (1, Case(T=5, B=3, H=33, direction="reverse", reset_h=False)),
    "no options": (2, Case(T=4, B=3, H=20, linear_before_reset=True).bare()),
    "no options, before": (1, Case(T=4, B=3, H=33).bare()),
    "long": (1, Case(T=30, B=1, H=5, linear_before_reset=True)),
}
_DTYPES = {
    "float32": list(_CALLS),
    "bfloat16": ["one row", "two rows", "128 units"],
    "float16": ["96 units", "four rows, before"],
}


@pytest.mark.parametrize(
    ("dtype", "name"), one_in(6, [(dtype, name) for dtype, names in _DTYPES.items() for name in names], several=True)
)
def test_emulated_kernels_match_the_reference(run, dtype, name):
    """Two groups with weights of their own."""
    rows_of_block, case = _CALLS[name]
    _check_emulated(run, dtype, rows_of_block, case, (60 if dtype == "float32" else 8) * EPS[dtype])


# Rows of a block on tensor cores: one tile of 8, or two.
_TENSOR_CALLS = {
    "one tile": (8, Case(T=4, B=11, H=43, direction="bidirectional", linear_before_reset=True)),
    "one tile, before": (8, Case(T=5, B=7, H=64, direction="reverse", clip=0.6)),
    "32 units": (16, Case(T=6, B=18, H=31, linear_before_reset=True)),
    "96 units": (8, Case(T=3, B=10, H=90, direction="reverse", linear_before_reset=True, clip=0.6)),
    "96 units, before": (8, Case(T=3, B=9, H=90, direction="bidirectional")),
    "128 units, one tile": (8, Case(T=4, B=11, H=128, direction="bidirectional", linear_before_reset=True)),
    "128 units": (16, Case(T=4, B=19, H=128, direction="bidirectional", linear_before_reset=True)),
    "128 units, before": (16, Case(T=3, B=33, H=101, direction="reverse")),
    "one step": (8, Case(T=1, B=3, H=17, linear_before_reset=True)),
    "resets to zero": (16, Case(T=6, B=19, H=128, direction="bidirectional", linear_before_reset=True, reset_h=False)),
    "resets to zero, before": (8, Case(T=5, B=11, H=43, direction="reverse", reset_h=False)),
    "no options": (16, Case(T=4, B=3, H=20, linear_before_reset=True).bare()),
    "no options, before": (8, Case(T=4, B=9, H=33).bare()),
}
_TENSOR_DTYPES = {
    "float32": list(_TENSOR_CALLS),
    "bfloat16": ["one tile", "32 units", "resets to zero", "96 units, before", "128 units", "128 units, before"],
    "float16": ["96 units, before", "128 units, one tile", "no options"],
}


@pytest.mark.parametrize(
    ("dtype", "name"),
    one_in(6, [(dtype, name) for dtype, names in _TENSOR_DTYPES.items() for name in names], several=True),
)
def test_emulated_tensor_kernels_match_the_reference(run, dtype, name):
    rows_of_block, case = _TENSOR_CALLS[name]
    tolerance = {"float32": 10 * 2.0**-11}.get(dtype, 8 * EPS[dtype])  # TF32
    _check_emulated(run, dtype, rows_of_block, case, tolerance, on_tensor_cores=True)


def _check_emulated(run, dtype, rows_of_block, case, relative, on_tensor_cores=False):
    groups = [_inputs(case.replace(seed=seed), dtype) for seed in range(2)]
    found = run(case, dtype, rows_of_block, _stacked([_arrays(case, *group) for group in groups]), on_tensor_cores)

    def check(what, values, expected):
        tolerance = relative * max(1, np.abs(expected).max())
        np.testing.assert_allclose(np.asarray(values, np.float64), expected, rtol=0, atol=tolerance, err_msg=what)

    for group, (inputs, cotangents) in enumerate(groups):
        if inputs.initial_h is None:  # the kernel gives its gradient in any case
            inputs = inputs._replace(initial_h=np.zeros((case.D, case.B, case.H)))
        y, y_h, gradients = gru_references.values_and_gradients(inputs, cotangents, **case.settings)
        of_group = {what: array[group] for what, array in found.items()}
        check("y", of_group["y"], y)
        check("y_h", of_group["y_h"], y_h)
        dgates = of_group["dgates"].astype(np.float64)
        check("dgates", dgates.sum(2), gradients.x)
        check("dh0", of_group["dh0"], gradients.initial_h)
        if inputs.reset_h is not None:
            check("dreset_h", of_group["dreset_h"], gradients.reset_h)
        if inputs.b is not None:
            check("dgates of each direction", dgates.sum((0, 1)), gradients.b[:, : 3 * case.H])
            recurrent = of_group["recurrent_dgates"].astype(np.float64) if case.linear_before_reset else dgates
            check("recurrent dgates of each direction", recurrent.sum((0, 1)), gradients.b[:, 3 * case.H :])


@pytest.mark.parametrize("on_tensor_cores", [False, True])
@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("linear_before_reset", [False, True])
def test_weights_that_are_no_numbers(run, linear_before_reset, direction, on_tensor_cores):
    """NaN in the weights does not reach steps past the length of a row."""
    case = Case(
        T=4, B=3, H=20, direction=direction, linear_before_reset=linear_before_reset, reset=False, reset_h=False
    )
    inputs, cotangents = _inputs(case, "float32")
    inputs.r[...] = np.nan
    arrays = _stacked([_arrays(case, inputs, cotangents)])
    found = run(case, "float32", 8 if on_tensor_cores else 2, arrays, on_tensor_cores)
    past = is_padding(inputs)
    assert not found["dgates"][0][past].any()
    assert not np.moveaxis(found["y"][0], 1, 2)[past].any()
    (row,) = np.flatnonzero(inputs.sequence_lens == 0)
    np.testing.assert_array_equal(found["y_h"][0, :, row], inputs.initial_h[:, row])
    np.testing.assert_array_equal(found["dh0"][0, :, row], cotangents.y_h[:, row])
    assert np.isnan(found["dh0"][0]).any()
