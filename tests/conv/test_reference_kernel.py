"""The CUDA kernels that check engines of cuDNN, emulated on the CPU and compared with NumPy. No GPU is needed."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
from cuda_module import NEEDS_CUDA_MODULE
from thorough import thorough_after
from tolerances import DTYPES

from jaxgrad._src.conv.call.geometry import ConvGeometry
from jaxgrad._src.conv.call.problem import ConvProblem
from jaxgrad._src.native import cuda

pytestmark = NEEDS_CUDA_MODULE

THREADS, PARTS = 32, 8
SUFFIXES = {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16"}


@pytest.fixture(scope="module")
def play(reference_kernels):
    """Launches a kernel: arrays are passed by their address, other arguments as they are."""
    library = ctypes.CDLL(str(reference_kernels))

    def play(name, blocks, *arguments):
        held = [
            ctypes.c_void_p(None if a is None else a.ctypes.data) if a is None or isinstance(a, np.ndarray) else a
            for a in arguments
        ]
        pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(a) for a in held))
        getattr(library, f"play_{name}")(blocks, THREADS, pointers)

    return play


def _problem(seed, dtype):
    """A lopsided convolution with groups, strides, dilation and padding, and any layout."""
    rng = np.random.default_rng(seed)
    n = seed % 3 + 1
    groups, inputs, outputs, batch = (int(size) for size in rng.integers(1, 4, 4))
    window, strides, dilation = (tuple(int(size) for size in rng.integers(1, 4, n)) for _ in range(3))
    padding = tuple((int(low), int(high)) for low, high in rng.integers(0, 4, (n, 2)))
    spatial = tuple((k - 1) * d + int(rng.integers(1, 6)) for k, d in zip(window, dilation, strict=True))
    specs = [tuple(int(axis) for axis in rng.permutation(n + 2)) for _ in range(3)]
    geometry = ConvGeometry(*specs, strides, padding, dilation, groups, spatial, window)
    return ConvProblem(geometry, batch, groups * inputs, groups * outputs, DTYPES[dtype])


def _logical(array, spec):
    return array.transpose(spec).astype(np.float64)


def _expected(problem, arrays, conv_pass):
    """The result of a pass, with logical axes, as a sum over the positions of the window."""
    g = problem.geometry
    x, w, y = (_logical(array, spec) for array, spec in zip(arrays, (g.lhs_spec, g.rhs_spec, g.out_spec), strict=True))
    groups = g.feature_group_count
    padded = np.pad(x, ((0, 0), (0, 0), *g.padding))
    grouped_x = padded.reshape(x.shape[0], groups, -1, *padded.shape[2:])
    grouped_y = y.reshape(y.shape[0], groups, -1, *y.shape[2:])
    grouped_w = w.reshape(groups, -1, *w.shape[1:])
    sums = [np.zeros_like(grouped_y), np.zeros_like(grouped_x), np.zeros_like(grouped_w)]
    for tap in itertools.product(*map(range, w.shape[2:])):
        places = tuple(
            slice(t * d, t * d + (size - 1) * s + 1, s)
            for t, d, s, size in zip(tap, g.rhs_dilation, g.window_strides, y.shape[2:], strict=True)
        )
        met, weights = grouped_x[(..., *places)], grouped_w[(..., *tap)]
        sums[0] += np.einsum("ngi...,goi->ngo...", met, weights)
        sums[1][(..., *places)] += np.einsum("ngo...,goi->ngi...", grouped_y, weights)
        flat_y, flat_x = (a.reshape(*a.shape[:3], -1) for a in (grouped_y, met))
        sums[2][(..., *tap)] += np.einsum("ngop,ngip->goi", flat_y, flat_x)
    if conv_pass == 1:
        inside = tuple(slice(low, low + size) for (low, _), size in zip(g.padding, x.shape[2:], strict=True))
        return sums[1][(..., *inside)].reshape(x.shape)
    return sums[conv_pass].reshape((y, x, w)[conv_pass].shape)


def _argument(program):
    return ctypes.create_string_buffer(program["argument"], len(program["argument"]))


@pytest.mark.parametrize("seed", thorough_after(4, range(9)))
@pytest.mark.parametrize("dtype", SUFFIXES)
@pytest.mark.parametrize("conv_pass", range(3))
def test_sums_match_numpy(play, conv_pass, dtype, seed):
    """All elements, and the sums of their absolute products; in the forward pass with bias."""
    problem = _problem(seed, dtype)
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in problem.shapes]
    epilogue = conv_pass == 0 and seed % 2 == 0
    bias = rng.standard_normal(problem.out_features).astype(DTYPES[dtype]) if epilogue else None
    program = cuda.module.reference_program(
        conv_pass, list(SUFFIXES).index(dtype), problem.shapes, problem.geometry.attributes()
    )
    expected = _expected(problem, arrays, conv_pass)
    absolute = _expected(problem, [abs(array) for array in arrays], conv_pass)
    if bias is not None:
        along = (slice(None), *(None,) * len(problem.geometry.window_strides))
        expected = expected + bias.astype(np.float64)[along]
        absolute += abs(bias.astype(np.float64))[along]
    elements = np.arange(expected.size)
    parts = np.full((expected.size, PARTS, 2), np.nan)
    play(f"reference_sums_{SUFFIXES[dtype]}", parts[..., 0].size, *arrays, bias, elements, parts, _argument(program))
    sums = parts.sum(1)
    np.testing.assert_allclose(sums[:, 0], expected.ravel(), rtol=0, atol=1e-14 * absolute.max())
    np.testing.assert_allclose(sums[:, 1], absolute.ravel(), rtol=1e-14)

    spec = (problem.geometry.out_spec, problem.geometry.lhs_spec, problem.geometry.rhs_spec)[conv_pass]
    result = arrays[(2, 0, 1)[conv_pass]]
    values = np.full(expected.size, np.nan)
    count = ctypes.c_uint(expected.size)
    play(f"reference_gather_{SUFFIXES[dtype]}", 3, result, elements, count, values, _argument(program))
    np.testing.assert_array_equal(values, _logical(result, spec).ravel())


@pytest.mark.parametrize(("dtype", "digits"), [("float32", 10), ("float32", 23), ("float64", 52), ("bfloat16", 7)])
def test_random_values(play, dtype, digits):
    """Of both signs, from 0.5 to 1, and exact in a type with so many digits after the first."""
    array = np.zeros(1000, DTYPES[dtype])
    count, seed = ctypes.c_longlong(990), ctypes.c_ulonglong(1 << 40)
    play(f"reference_fill_{SUFFIXES[dtype]}", 3, array, count, ctypes.c_int(digits), seed)
    assert not array[990:].any()
    values = array[:990].astype(np.float64)
    assert ((abs(values) >= 0.5) & (abs(values) < 1)).all()
    assert abs(values.mean()) < 0.1
    scaled = np.ldexp(values, digits + 1)
    np.testing.assert_array_equal(scaled, np.round(scaled))
    assert (scaled % 2 != 0).any()
    assert len(np.unique(values)) > min(200, 2**digits)


@pytest.mark.parametrize("conv_pass", range(3))
def test_samples_cover_corners_and_borders_of_groups(conv_pass):
    spec = (0, 3, 1, 2)
    geometry = ConvGeometry(spec, spec, spec, (1, 1), ((3, 3), (3, 3)), (1, 1), 5, (40, 37), (7, 7))
    problem = ConvProblem(geometry, 4, 40, 60, DTYPES["float32"])
    program = cuda.module.reference_program(conv_pass, 0, problem.shapes, geometry.attributes())
    sizes = [(4, 60, 40, 37), (4, 40, 40, 37), (60, 8, 7, 7)][conv_pass]
    index = np.array(np.unravel_index(program["samples"], sizes))
    found = {tuple(column) for column in index.T}
    assert found >= set(itertools.product(*((0, size - 1) for size in sizes)))
    grouped = 0 if conv_pass == 2 else 1
    group = sizes[grouped] // 5
    borders = {place for start in range(0, sizes[grouped], group) for place in (start, start + group - 1)}
    assert set(index[grouped]) >= borders
    assert set(index[grouped]) == set(range(sizes[grouped]))
    assert len(found) > 200
