"""The CUDA kernel of depthwise forward passes and input gradients, emulated on the CPU. No GPU is needed."""

from __future__ import annotations

import ctypes
import dataclasses
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aligned_arrays import aligned_empty, aligned_random
from cuda_module import NEEDS_CUDA_MODULE
from depthwise_calls import FEW_HOPPER, H200, LARGE_WINDOWS, SMALL, direct_sum
from depthwise_calls import DepthwiseCall as Call
from jax import lax
from thorough import one_in, thorough_after

from jaxgrad._src.conv.backend import PASSES
from jaxgrad._src.conv.call.geometry import ConvGeometry
from jaxgrad._src.conv.call.problem import ConvProblem
from jaxgrad._src.native import cuda

pytestmark = NEEDS_CUDA_MODULE

_ALIGNED = ("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error")  # a misaligned access ends the process

_MAIN = """
static T *in, *w, *bias, *out;
static DepthwiseArguments arguments;

extern "C" void run(T* in_, T* w_, T* bias_, T* out_, const void* arguments_, long long in_bytes, long long out_bytes,
                    int chunks, int shares, int threads, int bytes) {
  in = in_, w = w_, bias = bias_, out = out_;
  memcpy(&arguments, arguments_, sizeof(arguments));
  arrays = {{reinterpret_cast<char*>(in), reinterpret_cast<char*>(in) + in_bytes}};
  results = {{reinterpret_cast<char*>(out), reinterpret_cast<char*>(out) + out_bytes}};
  launch(chunks, shares, threads, bytes, [] { depthwise_convolution(in, w, bias, out, arguments); });
}
"""


def _program(problem, pass_name, relu=False, gpu=H200):
    from jaxgrad import _cuda

    dtype = cuda.float_type(jnp.dtype(problem.dtype))
    attributes = problem.geometry.attributes()
    return _cuda.depthwise_convolution_program(*gpu, PASSES.index(pass_name), dtype, relu, problem.shapes, attributes)


def _program_of(call, pass_name):
    return _program(call.problem, pass_name, call.relu and pass_name == "forward", call.gpu)


CALLS = {
    "ConvNeXt's window": Call(2, (14, 15), 40, (7, 7), padding=3),
    "one spatial axis": Call(3, (190,), 36, (31,), padding=((10, 20),), relu=True),
    "causal, bfloat16": Call(2, (67,), 64, (4,), dilation=2, padding=((6, 0),), dtype="bfloat16", relu=True),
    "stride and lopsided padding": Call(3, (14, 9), 18, (3, 4), (2, 3), padding=((0, 2), (3, 1))),
    "stride, bfloat16": Call(2, (15, 30), 24, (5, 5), 2, padding=((1, 2), (2, 2)), dtype="bfloat16"),
    "stride larger than the window": Call(2, (11, 9), 8, (2, 1), (3, 2), padding=((0, 1), (1, 0))),
    "dilation": Call(2, (17, 19), 20, (3, 2), 1, (2, 3), ((1, 2), (3, 1)), taps_last=True),
    "two channels, bfloat16": Call(2, (9, 8), 2, (3, 3), padding=1, dtype="bfloat16"),
    "one channel": Call(2, (9, 8), 1, (2, 3), padding=((1, 0), (2, 2))),
    "weights in shared memory": Call(1, (15, 14), 24, (11, 11), padding=5, relu=True),
    "weights in shared memory, small GPU": Call(1, (20, 9), 12, (13, 9), padding=4, gpu=SMALL, taps_last=True),
    "channels that no block divides": Call(3, (7, 7), 76, (3, 3), padding=1, taps_last=True),
    "images sharing a tile": Call(9, (3, 5), 8, (3, 3), padding=1, gpu=SMALL),
    "three axes": Call(2, (5, 9, 8), 24, (3, 3, 3), padding=1, dtype="bfloat16"),
    "three axes, strides": Call(2, (6, 9, 7), 12, (3, 5, 3), (1, 2, 2), padding=((2, 0), (1, 2), (1, 1))),
    "three axes, dilation": Call(1, (7, 8, 9), 8, (3, 2, 3), 1, (2, 1, 3), ((2, 2), (0, 1), (3, 3))),
    "weights behind an odd number": Call(1, (5, 11, 5), 9, (5, 5, 5), padding=2),
    "weights behind an odd number of elements, bfloat16": Call(
        1, (9, 7, 9), 20, (5, 5, 5), padding=2, dtype="bfloat16"
    ),
    "the window larger than the picture": Call(2, (3, 2), 12, (5, 7), padding=((2, 2), (3, 4))),
}


# Of toeplitz.cu.
MATRIX_CALLS = {
    "weights with their taps last": Call(1, (20, 33), 16, (13, 11), padding=((6, 6), (5, 4)), taps_last=True),
    "relu, channels that no block divides": Call(
        2, (19, 70), 40, (9, 10), padding=((5, 3), (0, 9)), relu=True, gpu=FEW_HOPPER
    ),
    "more rows of the window than of the input": Call(1, (17, 40), 16, (31, 31), padding=15),
    "the window larger than the picture": Call(1, (3, 5), 16, (13, 17), padding=((6, 6), (8, 8))),
    "two groups of rows before the first results": Call(1, (11, 19), 8, (21, 21), padding=10),
    "two rows of the window": Call(1, (40, 40), 8, (2, 33), padding=((0, 1), (16, 16))),
    "32 channels of a block": Call(1, (8, 30), 64, (5, 9), padding=((4, 0), (1, 7)), gpu=FEW_HOPPER),
    "wide tiles": Call(1, (10, 100), 24, (9, 11), padding=((4, 3), (0, 10)), relu=True, gpu=FEW_HOPPER),
    "the widest tiles": Call(1, (9, 125), 72, (5, 9), padding=((1, 3), (4, 4)), gpu=FEW_HOPPER),
}


def _random_matrix_call(seed: int) -> Call:
    """A convolution of toeplitz.cu with unequal sizes."""
    rng = np.random.default_rng(seed)
    while True:
        call = Call(
            batch=int(rng.integers(1, 3)),
            spatial=(int(rng.integers(1, 24)), int(rng.integers(1, 50))),
            channels=8 * int(rng.integers(1, 4)),
            window=(int(rng.integers(2, 15)), int(rng.integers(4, 34))),
            padding=tuple((int(a), int(b)) for a, b in rng.integers(0, 16, (2, 2))),
            dtype="bfloat16",
            taps_last=bool(rng.random() < 0.5),
            relu=bool(rng.random() < 0.5),
            gpu=FEW_HOPPER,
        )
        if min(call.out_spatial) > 0 and all(map(_multiplies_matrices, [call] * 2, ("forward", "input_gradient"))):
            return call


def _multiplies_matrices(call, pass_name):
    return "multiply_channel" in _program_of(call, pass_name)["source"]


def _random_call(seed: int) -> Call:
    """A convolution with unequal sizes."""
    rng = np.random.default_rng(seed)
    while True:
        n = int(rng.choice([1, 2, 2, 3]))
        strides = rng.integers(1, 4, n) if rng.random() < 0.5 else np.ones(n, int)
        dilation = np.where(strides > 1, 1, rng.integers(1, 4, n)) if rng.random() < 0.5 else np.ones(n, int)
        call = Call(
            batch=int(rng.integers(1, 6)),
            spatial=tuple(map(int, rng.integers(1, {1: 60, 2: 16, 3: 9}[n], n))),
            channels=2 * int(rng.integers(1, 40)),
            window=tuple(map(int, rng.integers(1, {1: 20, 2: 7, 3: 4}[n], n))),
            strides=tuple(map(int, strides)),
            dilation=tuple(map(int, dilation)),
            padding=tuple((int(a), int(b)) for a, b in rng.integers(0, 5, (n, 2))),
            dtype=str(rng.choice(["float32", "bfloat16"])),
            taps_last=bool(rng.random() < 0.5),
            relu=bool(rng.random() < 0.5),
            gpu=SMALL if rng.random() < 0.5 else H200,
        )
        if min(call.out_spatial) > 0:
            return call


def _reference(call, x, w):
    """y in float64, from w: [*window, channels]."""
    n = len(call.spatial)
    names = "xyz"[:n]
    return lax.conv_general_dilated(
        x,
        jnp.expand_dims(w, n),
        call.strides,
        call.padding,
        rhs_dilation=call.dilation,
        dimension_numbers=(f"N{names}C", f"{names}IO", f"N{names}C"),
        feature_group_count=call.channels,
        precision="highest",
    )


def _run(call, pass_name, array, w, bias, tmp_path, kernel_emulation):
    """The result of the emulated kernel."""
    program = _program_of(call, pass_name)
    source, library = tmp_path / "kernel.cc", tmp_path / "kernel.so"
    headers = [kernel_emulation]
    if _multiplies_matrices(call, pass_name):
        headers.append(kernel_emulation.with_name("matrix_emulation.h"))
    included = "".join(f'#include "{header}"\n' for header in headers)
    source.write_text(f"{included}{program['definitions']}{program['source']}{_MAIN}")
    subprocess.run(["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", *_ALIGNED, source, "-o", library], check=True)
    taken = np.ascontiguousarray(np.moveaxis(w, -1, 0)) if call.taps_last else w
    sizes = call.out_spatial if pass_name == "forward" else call.spatial
    out = aligned_empty((call.batch, *sizes, call.channels), call.dtype)
    out[...] = np.nan
    pointers = [None if a is None else ctypes.c_void_p(a.ctypes.data) for a in (array, taken, bias, out)]
    grid = (ctypes.c_int(program[key]) for key in ("chunks", "shares", "threads", "shared_bytes"))
    sizes = ctypes.c_longlong(array.nbytes), ctypes.c_longlong(out.nbytes)
    ctypes.CDLL(str(library)).run(*pointers, program["arguments"], *sizes, *grid)
    return out


def _check(call, pass_name, tmp_path, kernel_emulation):
    x_shape = (call.batch, *call.spatial, call.channels)
    shape = x_shape if pass_name == "forward" else (call.batch, *call.out_spatial, call.channels)
    array, w = aligned_random(shape, call.dtype, 1), aligned_random((*call.window, call.channels), call.dtype, 2)
    bias = aligned_random((call.channels,), call.dtype, 3) if call.relu and pass_name == "forward" else None
    out = _run(call, pass_name, array, w, bias, tmp_path, kernel_emulation)

    with jax.enable_x64(True):
        wide = jnp.asarray(array, jnp.float64), jnp.asarray(w, jnp.float64)
        if pass_name == "forward":
            expected = _reference(call, *wide)
            expected = expected if bias is None else expected + jnp.asarray(bias, jnp.float64)
            expected = jnp.maximum(expected, 0) if call.relu else expected
        else:
            zeros = jnp.zeros(x_shape, jnp.float64)
            (expected,) = jax.vjp(lambda x: _reference(call, x, wide[1]), zeros)[1](wide[0])
        expected = np.asarray(expected)
    _assert_close(out, expected, call.dtype)


@pytest.mark.parametrize("pass_name", ["forward", "input_gradient"])
@pytest.mark.parametrize("name", one_in(3, CALLS))
def test_emulated_kernel_matches_the_reference(name, pass_name, tmp_path, kernel_emulation):
    _check(CALLS[name], pass_name, tmp_path, kernel_emulation)


@pytest.mark.parametrize("pass_name", ["forward", "input_gradient"])
@pytest.mark.parametrize("seed", thorough_after(3, range(6)))
def test_emulated_kernel_matches_the_reference_of_random_calls(seed, pass_name, tmp_path, kernel_emulation):
    _check(_random_call(seed), pass_name, tmp_path, kernel_emulation)


@pytest.mark.parametrize("pass_name", ["forward", "input_gradient"])
@pytest.mark.parametrize("name", one_in(3, MATRIX_CALLS))
def test_emulated_products_of_matrices_match_the_reference(name, pass_name, tmp_path, kernel_emulation):
    call = dataclasses.replace(MATRIX_CALLS[name], dtype="bfloat16")
    assert _multiplies_matrices(call, pass_name)
    _check(call, pass_name, tmp_path, kernel_emulation)


@pytest.mark.parametrize("pass_name", ["forward", "input_gradient"])
@pytest.mark.parametrize("seed", thorough_after(1, range(4)))
def test_emulated_products_of_matrices_match_the_reference_of_random_calls(seed, pass_name, tmp_path, kernel_emulation):
    _check(_random_matrix_call(seed), pass_name, tmp_path, kernel_emulation)


@pytest.mark.parametrize(
    ("pass_name", "relu", "column"), [("forward", False, 20), ("forward", True, 21), ("input_gradient", False, 21)]
)
def test_emulated_products_of_matrices_keep_infinities_and_nan_in_their_windows(
    pass_name, relu, column, tmp_path, kernel_emulation
):
    """A tensor core multiplies zeros by elements that a result does not depend on."""
    call = Call(2, (40, 45), 24, (9, 7), padding=((4, 3), (2, 5)), dtype="bfloat16", relu=relu, gpu=FEW_HOPPER)
    assert _multiplies_matrices(call, pass_name)
    sizes = call.spatial if pass_name == "forward" else call.out_spatial
    array = aligned_random((call.batch, *sizes, call.channels), call.dtype, 1)
    array[0, 3, column, 1], array[1, 17, column, 9] = np.inf, -np.inf
    array[0, 30, 44, 17] = np.nan
    w = aligned_random((*call.window, call.channels), call.dtype, 2)
    w[0, 0, 3], w[8, 6, 20] = np.inf, np.nan
    bias = aligned_random((call.channels,), call.dtype, 3) if relu else None
    found = _run(call, pass_name, array, w, bias, tmp_path, kernel_emulation).astype(np.float64)
    expected = direct_sum(call, pass_name, array, w, bias)
    assert 50 < (~np.isfinite(np.delete(expected, (3, 20), -1))).sum() < 250
    _assert_close(found, expected, call.dtype)


NON_FINITE = [
    ("ConvNeXt's window", "forward"),
    ("ConvNeXt's window", "input_gradient"),
    ("one spatial axis", "forward"),
    ("stride and lopsided padding", "forward"),
    ("stride and lopsided padding", "input_gradient"),
    ("three axes, dilation", "input_gradient"),
]


@pytest.mark.parametrize(("name", "pass_name"), NON_FINITE)
def test_padding_is_multiplied_as_zeros_or_left_out(name, pass_name, tmp_path, kernel_emulation):
    """An element reaches the results whose window covers it. Along the first of several axes, padding may be left out.

    With the products by zeros, an infinite weight gives NaN where it meets padding; without, such a result is finite.
    """
    call = CALLS[name]
    sizes = call.spatial if pass_name == "forward" else call.out_spatial
    array = aligned_random((call.batch, *sizes, call.channels), call.dtype, 1)
    w = aligned_random((*call.window, call.channels), call.dtype, 2)
    first, last = (0,) * len(sizes), (-1,) * len(sizes)
    array[(0, *first, 0)], array[(-1, *last, 1)] = np.inf, np.nan
    for channel, tap, value in ((2, first, np.inf), (3, last, -np.inf), (4, last, np.nan)):
        w[(*tap, channel)] = value
    bias = aligned_random((call.channels,), call.dtype, 3) if call.relu and pass_name == "forward" else None
    found = _run(call, pass_name, array, w, bias, tmp_path, kernel_emulation)
    with_zeros, left_out = (
        direct_sum(call, pass_name, array, w, bias, axes) for axes in ((), (0,) if len(sizes) > 1 else ())
    )
    is_left_out = np.isnan(with_zeros) & ~np.isnan(found)
    _assert_close(found, np.where(is_left_out, left_out, with_zeros), call.dtype)


def _assert_close(found, expected, dtype):
    rounding = 2.0**-8 if dtype == "bfloat16" else 2.0**-21
    scale = max(np.abs(expected[np.isfinite(expected)]).max(), 1)
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=rounding, atol=rounding * scale)


@pytest.mark.parametrize("pass_name", ["forward", "input_gradient"])
@pytest.mark.parametrize("name", LARGE_WINDOWS)
def test_large_windows_are_products_of_matrices(name, pass_name):
    """tests/conv/test_depthwise_cuda.py runs them on a GPU."""
    for dtype in ("bfloat16", "float16"):
        assert _multiplies_matrices(dataclasses.replace(LARGE_WINDOWS[name], dtype=dtype), pass_name)
    assert not _multiplies_matrices(LARGE_WINDOWS[name], pass_name)


def test_matrix_calls_differ_in_all_sizes_of_a_tile():
    calls = [dataclasses.replace(call, dtype="bfloat16") for call in MATRIX_CALLS.values()]
    found = [_macros(_program_of(call, name)) for call in calls for name in ("forward", "input_gradient")]
    assert {macros["CC"] for macros in found} == {16, 32}
    assert len({macros["TILES"] for macros in found}) > 3
    assert {macros["RELU"] for macros in found} == {macros["TAPS_LAST"] for macros in found} == {0, 1}


def _macros(program):
    words = (line.split() for line in program["definitions"].splitlines())
    return {name: int(value) for _, name, value in words if value.isdigit()}


def test_calls_differ_in_all_sizes_of_a_tile():
    found = [_macros(_program_of(call, name)) for call in CALLS.values() for name in ("forward", "input_gradient")]
    for name in ("V", "R", "COLUMNS", "TN", "PATCHES", "STRIPS", "CC", "ROWS", "VECTOR", "WEIGHTS_SHARED"):
        assert len({macros[name] for macros in found}) > 1, name
    for macros in found:
        if macros["GRADIENT"]:
            assert macros["COLUMNS"] % macros["S2"] == 0
            assert macros["R"] % macros["S1"] == 0


@pytest.mark.parametrize("pass_name", ["forward", "input_gradient"])
def test_one_kernel_for_all_batch_sizes_and_lengths(pass_name):
    """Few programs serve a range of sizes: the sizes of the arrays are arguments."""
    images = {
        _program_of(Call(batch, (56, 56), 96, (3, 3), padding=1, dtype="bfloat16"), pass_name)["definitions"]
        for batch in range(1, 129, 3)
    }
    lengths = {
        _program_of(Call(8, (length,), 512, (31,), padding=15, dtype="bfloat16"), pass_name)["definitions"]
        for length in range(200, 4000, 37)
    }
    channels = {
        _program_of(Call(32, (28, 28), 8 * count, (5, 5), padding=2), pass_name)["definitions"]
        for count in range(4, 99)
    }
    assert len(images) <= 12
    assert len(lengths) <= 8
    assert len(channels) <= 24


REJECTED = {
    "the convolution is not depthwise": {"groups": 4},
    "it does not support float64": {"dtype": "float64"},
    "the operands must be channels last": {"spec": (0, 1, 2, 3)},
    "the channels of a pixel must be a multiple of 4 bytes": {"dtype": "bfloat16", "channels": 7, "groups": 7},
    "it does not support input gradients with a stride and dilation": {"strides": (2, 2), "dilation": (2, 2)},
    "the window is too large": {"window": (40, 40)},
}


@pytest.mark.parametrize("reason", REJECTED)
def test_rejection_names_the_reason(reason):
    typical = {
        "groups": 8,
        "dtype": "float32",
        "channels": 8,
        "dilation": (1, 1),
        "spec": (0, 3, 1, 2),
        "strides": (1, 1),
        "window": (3, 3),
    }
    groups, dtype, channels, dilation, spec, strides, window = {**typical, **REJECTED[reason]}.values()
    none = ((0, 0), (0, 0))
    g = ConvGeometry(spec, (3, 2, 0, 1), spec, strides, none, dilation, groups, (50, 50), window)
    with pytest.raises(ValueError, match=reason):
        _program(ConvProblem(g, 2, channels, channels, dtype), "input_gradient")
