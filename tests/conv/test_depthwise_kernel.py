"""The CUDA kernel of the depthwise weight gradient, emulated on the CPU for every tiling. No GPU is needed."""

from __future__ import annotations

import ctypes
import dataclasses
import subprocess

import jax.numpy as jnp
import numpy as np
import pytest
from aligned_arrays import aligned_random
from cuda_module import NEEDS_CUDA_MODULE
from depthwise_calls import H200, SMALL
from depthwise_calls import DepthwiseCall as Call

from jaxgrad._src.conv.call.geometry import ConvGeometry
from jaxgrad._src.conv.call.problem import ConvProblem
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


def _run(call, x, dy, tmp_path, kernel_emulation):
    """The result of the emulated kernel, [taps, channels] in float64."""
    program = _program(call.problem, call.gpu)
    source, library = tmp_path / "kernel.cc", tmp_path / "kernel.so"
    source.write_text(f'#include "{kernel_emulation}"\n{program["definitions"]}{program["source"]}{_MAIN}')
    subprocess.run(["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", source, "-o", library], check=True)
    taps = int(np.prod(call.window))
    unwritten = 12345
    partial = np.full(program["workspace_bytes"] // 4, unwritten, np.float32)
    dw = np.empty(taps * call.channels, x.dtype)
    grid = (ctypes.c_int(program[key]) for key in ("chunks", "shares", "threads", "shared_bytes"))
    pointers = (ctypes.c_void_p(array.ctypes.data) for array in (x, dy, partial, dw))
    sizes = ctypes.c_longlong(x.nbytes), ctypes.c_longlong(dy.nbytes)
    ctypes.CDLL(str(library)).run(*pointers, program["arguments"], *sizes, *grid)
    assert (partial != unwritten).all()  # the kernel writes all of the workspace
    found = dw.reshape((call.channels, taps) if call.taps_last else (taps, call.channels)).astype(np.float64)
    return found.T if call.taps_last else found


def _arrays(call):
    x = aligned_random((call.batch, *call.spatial, call.channels), call.dtype, 1)
    return x, aligned_random((call.batch, *call.out_spatial, call.channels), call.dtype, 2)


def _assert_close(found, expected, dtype):
    expected = expected.reshape(found.shape)
    rounding = 2.0**-8 if dtype == "bfloat16" else 2.0**-22
    scale = np.abs(expected[np.isfinite(expected)]).max()
    np.testing.assert_allclose(found, expected, rtol=rounding, atol=rounding * scale)


@pytest.mark.parametrize("name", CALLS)
def test_emulated_kernel_matches_the_reference(name, tmp_path, kernel_emulation):
    call = CALLS[name]
    x, dy = _arrays(call)
    _assert_close(_run(call, x, dy, tmp_path, kernel_emulation), _reference(call, x, dy), call.dtype)


@pytest.mark.parametrize("name", ["a window over one axis", "dilation", "bfloat16", "three axes, strides and dilation"])
def test_non_finite_elements_stay_in_their_channel(name, tmp_path, kernel_emulation):
    """An element of dy reaches all taps; padding of x is multiplied as zeros. An element of x may reach more taps than
    in exact arithmetic: those that it meets with the zeros after the end of dy, up to the end of a tile."""
    call = CALLS[name]
    x, dy = _arrays(call)
    n, macros = len(call.spatial), _macros(call)
    first, last = (0,) * n, (-1,) * n
    x[(0, *last, 1)], x[(-1, *last, 2)], x[(0, *first, 3)] = np.inf, np.nan, np.nan
    dy[(0, *first, 4)], dy[(-1, *last, 5)] = -np.inf, np.nan
    tile = (1, macros["TH"], macros["TW"])[-n:]
    added = [-size % part for size, part in zip(call.out_spatial, tile, strict=True)]
    axes = zip(call.padding, call.strides, added, strict=True)
    whole = dataclasses.replace(call, padding=tuple((low, high + s * more) for (low, high), s, more in axes))
    with np.errstate(invalid="ignore"):
        exact = _reference(call, x, dy)
        expected = _reference(whole, x, np.pad(dy, ((0, 0), *((0, more) for more in added), (0, 0))))
    assert np.isfinite(np.delete(expected, range(1, 6), -1)).all()
    assert not np.isfinite(expected[..., 4:6]).any()
    assert (np.isfinite(exact) & ~np.isfinite(expected)).any() == any(added)
    _assert_close(_run(call, x, dy, tmp_path, kernel_emulation), expected, call.dtype)


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
