"""The CUDA kernels that transpose arrays and reverse axes, emulated on the CPU. No GPU is needed."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import subprocess

import numpy as np
import pytest
from cuda_module import NEEDS_CUDA_MODULE, NO_CUDA_MODULE

from jaxgrad._src.native import cuda

if not cuda.targets():  # the cases below are drawn with the compiled module
    pytest.skip(NO_CUDA_MODULE, allow_module_level=True)
pytestmark = NEEDS_CUDA_MODULE

KERNELS = [
    *(f"transpose_{few}{size}" for few in ("", "few_") for size in (2, 4, 8)),
    "transpose_pairs",
    *(f"move_rows_{size}" for size in (2, 4, 8, 16)),
]
_MARGIN = 64  # elements on both sides of an array, which no kernel may write
_MAIN = """
static TransposeArguments t;
static const void* in;
static void* out;

template <class T>
static void play(void (*kernel)(const T*, T*, TransposeArguments)) {
  kernel(static_cast<const T*>(in), static_cast<T*>(out), t);
}

#define RUN(NAME)                                                                                     \\
  extern "C" void run_##NAME(const void* argument, const void* in_, void* out_, unsigned blocks) { \\
    memcpy(&t, argument, sizeof(t)), in = in_, out = out_;                                            \\
    launch(blocks, 1, kTransposeThreads, 0, [] { play(NAME); });                                      \\
  }
"""


@dataclasses.dataclass(frozen=True)
class Call:
    """Moves axes of `sizes` from the order `spec` to `result_spec`, and reverses the axes in `reversed_axes`."""

    sizes: tuple[int, ...]
    spec: tuple[int, ...]
    result_spec: tuple[int, ...]
    reversed_axes: tuple[int, ...]
    element_bytes: int = 2

    def program(self):
        from jaxgrad import _cuda

        to = [
            -stride if axis in self.reversed_axes else stride
            for axis, stride in enumerate(_strides(self.sizes, self.result_spec))
        ]
        return _cuda.transpose_program(self.element_bytes, self.sizes, _strides(self.sizes, self.spec), to)


def _strides(sizes, spec):
    """Strides in elements, by logical axis."""
    return [math.prod(size for size, place in zip(sizes, spec, strict=True) if place > own) for own in spec]


def _laid(array, spec):
    return np.ascontiguousarray(array.transpose(np.argsort(spec)))


# The axes are those of weights: output features, input features, window.
WINDOW = (2, 3, 4)
CHANNELS_LAST = {3: (0, 2, 1), 4: (0, 3, 1, 2), 5: (0, 4, 1, 2, 3)}  # OHWI
OUTPUTS_LAST = {3: (2, 1, 0), 4: (3, 2, 0, 1), 5: (4, 3, 0, 1, 2)}  # HWIO
INPUTS_LAST = {3: (1, 2, 0), 4: (2, 3, 0, 1), 5: (3, 4, 0, 1, 2)}  # HWOI: the layout HWIO of a transposed convolution


def _weights(*sizes, result_spec=None, element_bytes=2):
    rank = len(sizes)
    return Call(sizes, CHANNELS_LAST[rank], result_spec or OUTPUTS_LAST[rank], WINDOW[: rank - 2], element_bytes)


CALLS = {
    "a window over one axis": _weights(66, 34, 5),
    "a window over two axes, which are one for the kernel": _weights(130, 70, 4, 3),
    "a window over three axes, four bytes": _weights(65, 33, 2, 3, 2, element_bytes=4),
    "eight bytes": _weights(70, 40, 3, 2, element_bytes=8),
    "pairs that no tile divides": _weights(98, 74, 3, 2),
    "odd numbers": _weights(67, 35, 3, 2),
    "few input features": _weights(150, 3, 5, 4),
    "few output features, four bytes": _weights(5, 150, 4, 3, element_bytes=4),
    "few features, eight bytes": _weights(5, 7, 4, 3, element_bytes=8),
    "rows": _weights(70, 48, 4, 3, result_spec=INPUTS_LAST[4]),
    "rows of a window over one axis": _weights(33, 20, 5, result_spec=INPUTS_LAST[3]),
    "rows of a window over three axes": _weights(20, 34, 2, 3, 4, result_spec=INPUTS_LAST[5]),
    "rows of a window over three axes, all apart": _weights(6, 36, 2, 3, 5, result_spec=(2, 4, 1, 3, 0)),
    "rows of odd length": _weights(40, 35, 3, 2, result_spec=INPUTS_LAST[4]),
    "rows of odd length, four bytes": _weights(40, 35, 3, 2, result_spec=INPUTS_LAST[4], element_bytes=4),
    "rows, eight bytes": _weights(24, 9, 3, 2, result_spec=INPUTS_LAST[4], element_bytes=8),
    "rows longer than a tile": _weights(5, 8200, 2, result_spec=INPUTS_LAST[3]),
    "rows reversed in their order alone": _weights(20, 16, 3, 2, result_spec=CHANNELS_LAST[4]),
    "the window's axes apart": _weights(18, 20, 2, 3, 4, result_spec=(3, 1, 4, 0, 2)),
    "the window's axes swapped": _weights(34, 36, 2, 3, result_spec=(3, 2, 1, 0)),
    "the window's last axis side by side": _weights(64, 36, 3, 5, result_spec=(0, 1, 2, 3)),
    "the window as rows": _weights(3, 40, 5, 9, result_spec=(0, 1, 2, 3)),
    "a long window as rows, in pairs": _weights(4, 66, 34, result_spec=(0, 1, 2)),
    "the window as columns": Call((40, 3, 6, 7), (0, 1, 2, 3), (3, 2, 0, 1), (2, 3)),
    "a long window as columns, in pairs": Call((66, 4, 34), (0, 1, 2), (2, 1, 0), (2,)),
    "one axis of a window": Call((66, 34, 4, 3), (0, 3, 1, 2), (3, 2, 0, 1), (3,)),
    "features too": Call((66, 34, 4, 3), (0, 3, 1, 2), (3, 2, 0, 1), (0, 1, 2, 3)),
    "an axis of one tap": _weights(64, 36, 1, 5),
    "nothing reversed": Call((66, 34, 4, 3), (0, 3, 1, 2), (3, 2, 0, 1), ()),
}


def _random_call(seed):
    rng = np.random.default_rng(seed)
    while True:
        window = rng.integers(1, 6, rng.integers(1, 4))
        sizes = tuple(int(size) for size in (*rng.choice([1, 2, 6, 17, 33, 40, 64, 70], 2), *window))
        rank = len(sizes)
        spec, result_spec = (tuple(map(int, rng.permutation(rank))) for _ in range(2))
        spec = [spec, CHANNELS_LAST[rank]][int(rng.integers(2))]
        reversed_axes = [WINDOW[: rank - 2], tuple(axis for axis in range(rank) if rng.random() < 0.5)][
            int(rng.integers(2))
        ]
        call = Call(sizes, spec, result_spec, reversed_axes, int(rng.choice([2, 2, 4, 8])))
        if math.prod(sizes) < 40000 and cuda.module.transpose_supported(sizes, spec, result_spec, reversed_axes):
            return call


CALLS |= {f"random {seed}": _random_call(seed) for seed in range(60)}


@pytest.fixture(scope="module")
def library(tmp_path_factory, kernel_emulation):
    """The source of the kernels, compiled for the CPU."""
    folder = tmp_path_factory.mktemp("transpose")
    source = f'#include "{kernel_emulation}"\n{CALLS["odd numbers"].program()["source"]}{_MAIN}'
    source += "".join(f"RUN({kernel})\n" for kernel in KERNELS)
    (folder / "kernels.cc").write_text(source)
    command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", folder / "kernels.cc", "-o", folder / "kernels.so"]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(folder / "kernels.so"))


@pytest.mark.parametrize("name", CALLS)
def test_emulated_kernel_matches_the_reference(name, library):
    call = CALLS[name]
    program = call.program()
    dtype = np.dtype(f"u{call.element_bytes}")
    array = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, call.sizes, dtype)
    taken = np.pad(_laid(array, call.spec).ravel(), _MARGIN)
    written = np.zeros_like(taken)
    start = _MARGIN * call.element_bytes
    pointers = (ctypes.c_void_p(a.ctypes.data + start) for a in (taken, written))
    run = getattr(library, f"run_{program['kernel']}")
    run(program["argument"], *pointers, ctypes.c_uint(program["blocks"]))
    expected = np.pad(_laid(np.flip(array, call.reversed_axes), call.result_spec).ravel(), _MARGIN)
    np.testing.assert_array_equal(written, expected)


class TransposeArguments(ctypes.Structure):
    """The struct of ffi/cuda/transpose/kernel_arguments.h."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("in_start", "out_start", "rows", "columns")),
        *((name, ctypes.c_int) for name in ("in_row_stride", "out_row_stride", "out_column_stride")),
        ("sizes", 3 * ctypes.c_uint),
        *((name, 3 * ctypes.c_int) for name in ("in_strides", "out_strides")),
        *((name, ctypes.c_uint) for name in ("tile_rows", "tile_columns", "row_tiles", "column_tiles")),
    )


def test_calls_cover_every_branch():
    """Every branch of the kernels runs in some call."""
    programs = [(call, call.program()) for call in CALLS.values()]
    found = [(call, p["kernel"], TransposeArguments.from_buffer_copy(p["argument"])) for call, p in programs]
    transposing = {"transpose_2", "transpose_few_2", "transpose_pairs"}
    assert {kernel for _, kernel, t in found if t.in_start or t.out_start} == set(KERNELS)
    assert {kernel for _, kernel, t in found if t.in_row_stride < 0} >= transposing
    assert {kernel for _, kernel, t in found if t.out_column_stride < 0} >= transposing
    tiled = {kernel for _, kernel, t in found if t.row_tiles > 1 and t.column_tiles > 1}
    assert tiled >= {"transpose_2", "transpose_pairs", "move_rows_16"}
    reversed_sizes = [
        (call, [size for size, stride in zip(t.sizes, t.out_strides, strict=True) if stride < 0])
        for call, _, t in found
    ]
    assert {len(sizes) for _, sizes in reversed_sizes} == {0, 1, 2, 3}
    assert any(size not in call.sizes for call, sizes in reversed_sizes for size in sizes)  # of several axes


@pytest.mark.parametrize(("result_spec", "reversed_axes"), [((1, 0, 2), (2,)), ((0, 1, 2), ())], ids=str)
def test_rejected_transposes(result_spec, reversed_axes):
    """Rows with reversed elements, and a plain copy."""
    call = Call((64, 32, 3), (0, 1, 2), result_spec, reversed_axes)
    assert not cuda.module.transpose_supported(call.sizes, call.spec, result_spec, reversed_axes)
    with pytest.raises(ValueError, match="the kernels do not support this transpose"):
        call.program()


@pytest.mark.parametrize(
    ("sizes", "from_spec", "to_spec", "reversed_axes", "supported"),
    [
        ((64, 32, 3), (0, 2, 1), (2, 1, 0), (), True),  # the contiguous axis changes
        ((64, 32, 3), (0, 2, 1), (2, 1, 0), (2,), True),
        ((64, 32, 3), (0, 2, 1), (1, 2, 0), (), False),  # rows are moved
        ((64, 32, 3), (0, 2, 1), (1, 2, 0), (2,), True),  # and reversed in their order
        ((64, 32, 1), (0, 2, 1), (1, 2, 0), (2,), False),  # an axis of one element cannot be reversed
        ((64, 32, 3), (0, 2, 1), (1, 2, 0), (1,), False),  # elements of rows are reversed
        ((64, 32, 3), (0, 2, 1), (0, 2, 1), (2,), False),  # nothing is transposed
        ((1, 1, 1), (0, 2, 1), (2, 1, 0), (2,), False),
        ((1 << 20, 1 << 10, 2), (0, 2, 1), (2, 1, 0), (), False),  # 2^31 elements
        ((1 << 20, 1 << 10, 1), (0, 2, 1), (2, 1, 0), (), True),
    ],
    ids=str,
)
def test_transpose_supported(sizes, from_spec, to_spec, reversed_axes, supported):
    assert cuda.module.transpose_supported(sizes, from_spec, to_spec, reversed_axes) is supported


@pytest.mark.parametrize("spec", [(0, 1), (0, 0, 1), (0, 1, 3)])
def test_transpose_supported_checks_its_arguments(spec):
    with pytest.raises(ValueError, match="spec"):
        cuda.module.transpose_supported((2, 3, 4), spec, (0, 1, 2), ())
