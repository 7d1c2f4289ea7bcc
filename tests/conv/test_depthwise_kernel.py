"""The CUDA kernel of the depthwise weight gradient, emulated on the CPU for every tiling. No GPU is needed."""

from __future__ import annotations

import ctypes
import subprocess

import jax.numpy as jnp
import numpy as np
import pytest
from aligned_arrays import aligned_random
from cuda_module import NEEDS_CUDA_MODULE
from depthwise_calls import H200, SMALL
from depthwise_calls import DepthwiseCall as Call

from jaxgrad._src.conv.geometry import ConvGeometry
from jaxgrad._src.conv.problem import ConvProblem
from jaxgrad._src.native import cuda

pytestmark = NEEDS_CUDA_MODULE

_MAIN = """
static T *x, *dy, *dw;
static float* partial;
static int shares;
static DepthwiseGradientArguments arguments;

extern "C" void run(T* x_, T* dy_, float* partial_, T* dw_, const void* arguments_, long long x_bytes,
                    long long dy_bytes, int chunks, int shares_, int threads, int bytes) {
  x = x_, dy = dy_, partial = partial_, dw = dw_, shares = shares_;
  memcpy(&arguments, arguments_, sizeof(arguments));
  arrays = {{reinterpret_cast<char*>(x), reinterpret_cast<char*>(x) + x_bytes},
            {reinterpret_cast<char*>(dy), reinterpret_cast<char*>(dy) + dy_bytes}};
  launch(chunks, shares, threads, bytes, [] { depthwise_weight_gradient_partial(x, dy, partial, arguments); });
  launch((KZ * TAPS * arguments.channels + 31) / 32, 1, 32 * SLICES, 0,
         [] { depthwise_weight_gradient_sum(partial, dw, shares, arguments.channels); });
}
"""


def _program(problem, gpu=H200):
    from jaxgrad import _cuda

    dtype = cuda.float_type(jnp.dtype(problem.dtype))
    return _cuda.depthwise_weight_gradient_program(*gpu, dtype, problem.shapes, problem.geometry.attributes())


CALLS = {
    "ConvNeXt's window": Call(2, (14, 15), 40, (7, 7), padding=3),
    "a window over one axis": Call(3, (190,), 36, (31,), (1,), (1,), ((10, 20),)),
    "stride and lopsided padding": Call(3, (14, 9), 18, (3, 4), (2, 3), padding=((0, 2), (3, 1))),
    "dilation": Call(2, (17, 19), 20, (3, 2), (1, 3), (2, 3), ((1, 2), (3, 1)), taps_last=True),
    "bfloat16": Call(3, (13, 11), 24, (5, 3), (2, 1), padding=((2, 2), (0, 1)), dtype="bfloat16"),
    "bfloat16, two channels": Call(2, (9, 8), 2, (3, 3), padding=1, dtype="bfloat16"),
    "one channel": Call(2, (9, 8), 1, (2, 3), padding=((1, 0), (2, 2))),
    "the window's rows shared out": Call(2, (30, 28), 8, (11, 11), padding=5, gpu=SMALL),
    "a small GPU": Call(2, (28, 30), 72, (7, 5), (1, 2), padding=((3, 3), (2, 1)), gpu=SMALL),
    "channels that no block divides": Call(3, (7, 7), 76, (3, 3), padding=1, taps_last=True),
    "images sharing a tile": Call(9, (3, 5), 8, (3, 3), padding=1, gpu=SMALL),
    "a window without neighbours": Call(2, (9, 7), 16, (1, 1), (2, 2)),
    "three axes": Call(2, (6, 9, 8), 20, (3, 3, 5), (1, 1, 1), (1, 1, 1), ((1, 1), (0, 2), (2, 2))),
    "three axes, strides and dilation": Call(
        3,
        (7, 9, 5),
        6,
        (2, 3, 2),
        (2, 1, 2),
        (3, 2, 1),
        ((2, 1), (1, 2), (0, 1)),
        "bfloat16",
        taps_last=True,
        gpu=SMALL,
    ),
    "the window larger than the picture": Call(2, (3, 2), 12, (5, 7), padding=((2, 2), (3, 4))),
}


def _reference(call, x, dy):
    """[*window, channels] in float64: a sum over all elements for each window position."""
    n = len(call.spatial)
    padded = np.pad(x.astype(np.float64), ((0, 0), *call.padding, (0, 0)))
    dw = np.empty((*call.window, call.channels))
    for tap in np.ndindex(*call.window):
        places = (
            slice(t * d, t * d + (out - 1) * s + 1, s)
            for t, d, s, out in zip(tap, call.dilation, call.strides, call.out_spatial, strict=True)
        )
        met = padded[(slice(None), *places, slice(None))]
        dw[tap] = (met * dy.astype(np.float64)).sum(axis=tuple(range(n + 1)))
    return dw


@pytest.mark.parametrize("name", CALLS)
def test_emulated_kernel_matches_the_reference(name, tmp_path, kernel_emulation):
    call = CALLS[name]
    program = _program(call.problem, call.gpu)
    source, library = tmp_path / "kernel.cc", tmp_path / "kernel.so"
    source.write_text(f'#include "{kernel_emulation}"\n{program["definitions"]}{program["source"]}{_MAIN}')
    subprocess.run(["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", source, "-o", library], check=True)
    x = aligned_random((call.batch, *call.spatial, call.channels), call.dtype, 1)
    dy = aligned_random((call.batch, *call.out_spatial, call.channels), call.dtype, 2)
    taps = int(np.prod(call.window))
    partial = np.full(program["workspace_bytes"] // 4, np.nan, np.float32)
    dw = np.empty(taps * call.channels, x.dtype)
    grid = (ctypes.c_int(program[key]) for key in ("chunks", "shares", "threads", "shared_bytes"))
    pointers = (ctypes.c_void_p(array.ctypes.data) for array in (x, dy, partial, dw))
    sizes = ctypes.c_longlong(x.nbytes), ctypes.c_longlong(dy.nbytes)
    ctypes.CDLL(str(library)).run(*pointers, program["arguments"], *sizes, *grid)
    found = dw.reshape((call.channels, taps) if call.taps_last else (taps, call.channels)).astype(np.float64)
    found = found.T if call.taps_last else found
    expected = _reference(call, x, dy).reshape(taps, call.channels)
    rounding = 2.0**-8 if call.dtype == "bfloat16" else 2.0**-22
    np.testing.assert_allclose(found, expected, rtol=rounding, atol=rounding * np.abs(expected).max())
    assert not np.isnan(partial).any()  # the kernel writes all of the workspace


def _macros(call):
    return {
        name: int(value)
        for _, name, value in (line.split() for line in _program(call.problem, call.gpu)["definitions"].splitlines())
        if value.isdigit()
    }


def test_calls_cover_every_branch():
    """Every branch of the kernel runs in some call."""
    found = [_macros(call) for call in CALLS.values()]
    for name in ("TN", "SUB_H", "SUB_W", "GROUPS", "VECTOR", "BLOCKS", "STAGES", "CC"):
        assert len({macros[name] for macros in found}) > 1, name
    for macros in found:
        assert macros["TH"] % macros["SUB_H"] == 0
        assert macros["TW"] % macros["SUB_W"] == 0
    for name in ("WHOLE_TILES", "WHOLE_BLOCKS", "PLANES_ALIKE"):
        assert {macros[name] for macros in found} == {0, 1}, name
    assert any((1, *call.out_spatial)[-2] % macros["TH"] for call, macros in zip(CALLS.values(), found, strict=True))


def test_one_program_for_all_batch_sizes_and_lengths():
    """Few programs serve a range of sizes: the sizes of the arrays are arguments."""

    def programs(calls):
        return {_program(call.problem)["definitions"] for call in calls}

    images = programs(Call(n, (56, 56), 96, (3, 3), padding=1, dtype="bfloat16") for n in range(1, 129, 3))
    lengths = programs(Call(8, (n,), 512, (31,), padding=15, dtype="bfloat16") for n in range(200, 4000, 37))
    channels = programs(Call(32, (28, 28), 8 * n, (5, 5), padding=2) for n in range(4, 99))
    assert len(images) <= 8
    assert len(lengths) <= 8
    assert len(channels) <= 12


REJECTED = {
    "the convolution is not depthwise": {"groups": 4},
    "it does not support float64": {"dtype": "float64"},
    "the operands must be channels last": {"spec": (0, 1, 2, 3)},
    "the channels of a pixel must be a multiple of 4 bytes": {"dtype": "bfloat16", "channels": 7, "groups": 7},
    "no tiling fits": {"dilation": (300, 300), "size": 700},
}


@pytest.mark.parametrize("reason", REJECTED)
def test_rejection_names_the_reason(reason):
    typical = {"groups": 8, "dtype": "float32", "channels": 8, "dilation": (1, 1), "size": 9, "spec": (0, 3, 1, 2)}
    groups, dtype, channels, dilation, size, spec = {**typical, **REJECTED[reason]}.values()
    none = ((0, 0), (0, 0))
    g = ConvGeometry(spec, (3, 2, 0, 1), spec, (1, 1), none, dilation, groups, (size, size), (3, 3))
    with pytest.raises(ValueError, match=reason):
        _program(ConvProblem(g, 2, channels, channels, dtype))
