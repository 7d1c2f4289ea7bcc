"""The benchmarks' calls of cuDNN's RNN functions: types against cuDNN's headers, results on a fake library."""

from __future__ import annotations

import ctypes
import importlib.util
import multiprocessing
import re
import threading
from functools import partial
from pathlib import Path

import benchmarks_package  # noqa: F401
import crashing_process
import jax
import numpy as np
import pytest

import jaxgrad
from benchmarks import gru

torch = pytest.importorskip("torch")

from benchmarks import cudnn_rnn, cudnn_worker  # noqa: E402

_POINTERS = {cudnn_rnn._pointer, cudnn_rnn._ints, cudnn_rnn._pointer_result, cudnn_rnn._size_result}
_SCALARS = {
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int,
    "uint32_t": ctypes.c_uint32,
    "unsigned": ctypes.c_uint32,
    "size_t": ctypes.c_size_t,
    "float": ctypes.c_float,
    "unsigned long long": ctypes.c_ulonglong,
}
_ENUMS = "RNNAlgo RNNMode RNNBiasMode DirectionMode RNNInputMode DataType MathType ForwardMode RNNDataLayout WgradMode"


def _headers():
    found = importlib.util.find_spec("nvidia")
    folders = [Path(folder, "cudnn", "include") for folder in (found.submodule_search_locations if found else ())]
    text = "".join(path.read_text() for folder in folders for path in sorted(folder.glob("cudnn_*.h")))
    if not text:
        pytest.skip("cuDNN's headers are not installed")
    return re.sub(r"/\*.*?\*/", "", text, flags=re.S)


def _type_of(argument):
    """The ctypes type of an argument in a header; None for a pointer."""
    words = argument.replace("const ", "").split("[")[0].strip().rsplit(" ", 1)[0].strip()
    if (
        "*" in argument
        or "[" in argument
        or re.fullmatch(r"cudnn\w*(Descriptor|Handle)_t|cudnnHandle_t|cudaStream_t", words)
    ):
        return None
    enums = {f"cudnn{name}_t" for name in _ENUMS.split()}
    return ctypes.c_int if words in enums else _SCALARS[words]


@pytest.mark.parametrize("name", cudnn_rnn.FUNCTIONS)
def test_argument_types(name):
    (arguments,) = set(re.findall(rf"\b{name}\(([^)]*)\);", _headers()))
    expected = [_type_of(argument) for argument in " ".join(arguments.split()).split(",")]
    assert [None if each in _POINTERS else each for each in cudnn_rnn.FUNCTIONS[name]] == expected


@pytest.mark.parametrize("name", cudnn_rnn.ENUMERATORS)
def test_enumerators(name):
    (value,) = set(re.findall(rf"\b{name}\s*=\s*(\d+)", _headers()))
    assert cudnn_rnn.ENUMERATORS[name] == int(value)


class _FakeLibrary:
    """The functions on a CPU, in float32, by torch.nn.GRU. Its linear layers lie apart, in reversed order.

    PERSIST_DYNAMIC cannot be built, and PERSIST_STATIC computes another y.
    """

    _GAP = 5  # of floats, after each matrix and each bias

    def __init__(self):
        self.cudnnGetErrorString = lambda status: b"CUDNN_STATUS_FAKE"
        for name, arguments in cudnn_rnn.FUNCTIONS.items():
            function = partial(
                self._call, getattr(self, "_" + name.removeprefix("cudnn").lower(), lambda *arguments: 0), name
            )
            setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(function))
        self._made, self._gradients, self.failures = 0, None, []

    def _call(self, function, name, *arguments):
        try:
            if name.startswith("cudnnCreate"):
                self._made += 1
                arguments[0][0] = self._made
                return 0
            return function(*arguments) or 0
        except BaseException as error:  # ctypes drops it
            self.failures.append(error)
            return 1

    def _setrnndescriptor_v8(self, rnn, algorithm, cell, bias, direction, skip, dtype, sums, math, *sizes):
        I, H, projection, layers, _, padded = sizes  # noqa: E741
        assert (cell, bias, skip, dtype, sums, projection, layers) == (3, 2, 0, 0, 0, H, 1)
        self._algorithm, self._padded, (self._I, self._H, self._D) = algorithm, padded, (I, H, 1 + direction)

    def _setrnndatadescriptor(self, data, dtype, layout, T, B, features, lengths, fill):
        assert layout == (0 if self._padded else 1)
        self._T, self._B, self._lengths = T, B, lengths[:B]

    def _buildrnndynamic(self, handle, rnn, rows):
        return 3000

    def _layers(self):
        """The offsets and shapes, in floats, of each direction and linear layer."""
        found, end = {}, 3
        for d in reversed(range(self._D)):
            for layer in reversed(range(6)):
                shape = (self._H, self._H if layer > 2 else self._I)
                found[d, layer] = end, shape, end + np.prod(shape) + self._GAP
                end = found[d, layer][2] + self._H + self._GAP
        return found, end

    def _getrnnweightspacesize(self, handle, rnn, size):
        size[0] = 4 * int(self._layers()[1])

    def _getrnnweightparams(self, handle, rnn, d, size, space, layer, matrix_shape, matrix, bias_shape, bias):
        first, _, second = self._layers()[0][d, layer]
        matrix[0], bias[0] = space + 4 * int(first), space + 4 * int(second)

    def _getrnntempspacesizes(self, handle, rnn, mode, data, workspace, reserve):
        workspace[0], reserve[0] = 1000, 2000 if mode else 0

    def _at(self, pointer, *shape):
        count = int(np.prod(shape))
        return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_float * count).from_address(pointer))).view(shape)

    def _rnnforward(self, handle, rnn, mode, lengths, xd, x, yd, y, hd, hx, hy, cd, cx, cy, *memory):
        weight_bytes, weights, workspace_bytes, _, reserve_bytes, reserve = memory
        (T, B, I, D, H), (layers, count) = (self._T, self._B, self._I, self._D, self._H), self._layers()  # noqa: E741
        assert list((ctypes.c_int * B).from_address(lengths)) == self._lengths
        assert (weight_bytes, workspace_bytes) == (4 * count, 1000)
        assert (reserve_bytes, bool(reserve)) == ((2000, True) if mode else (0, False))
        buffer, module = self._at(weights, int(count)), torch.nn.GRU(I, H, bidirectional=D == 2)
        with torch.no_grad():
            for d, (w, r, wb, rb) in enumerate(module.all_weights):
                for layer in range(6):
                    first, shape, second = layers[d, layer]
                    rows = slice(layer % 3 * H, (layer % 3 + 1) * H)
                    (r if layer > 2 else w)[rows] = buffer[first : first + np.prod(shape)].view(shape)
                    (rb if layer > 2 else wb)[rows] = buffer[second : second + H]
        inputs = [self._at(x, T, B, I).clone().requires_grad_(), self._at(hx, D, B, H).clone().requires_grad_()]
        packed = torch.nn.utils.rnn.pack_padded_sequence(inputs[0], torch.tensor(self._lengths), enforce_sorted=False)
        found, last = module(packed, inputs[1])
        found, _ = torch.nn.utils.rnn.pad_packed_sequence(found, total_length=T)
        self._at(y, T, B, D * H)[:] = found.detach() * (1.5 if self._algorithm == 1 else 1)
        self._at(hy, D, B, H)[:] = last.detach()
        self._forward, self._gradients = (module, inputs, found, last) if mode else None, None

    def _rnnbackwarddata_v8(self, handle, rnn, lengths, yd, y, dy, xd, dx, hd, hx, dhy, dhx, *rest):
        module, inputs, found, last = self._forward
        cotangents = self._at(dy, *found.shape), self._at(dhy, *last.shape)
        parameters = [p for those in module.all_weights for p in those]
        gx, gh, *self._gradients = torch.autograd.grad((found, last), (*inputs, *parameters), cotangents)
        self._at(dx, *gx.shape)[:], self._at(dhx, *gh.shape)[:] = gx, gh

    def _rnnbackwardweights_v8(self, handle, rnn, add, lengths, xd, x, hd, hx, yd, y, weight_bytes, weights, *rest):
        assert add == 0
        (layers, count), H = self._layers(), self._H
        buffer = self._at(weights, int(count))
        for (d, layer), (first, shape, second) in layers.items():
            w, r, wb, rb = self._gradients[4 * d : 4 * d + 4]
            rows = slice(layer % 3 * H, (layer % 3 + 1) * H)
            buffer[first : first + np.prod(shape)] += (r if layer > 2 else w)[rows].flatten()
            buffer[second : second + H] += (rb if layer > 2 else wb)[rows]


@pytest.mark.parametrize(("bidirectional", "lengths"), [(True, False), (False, True)])
def test_results_on_a_fake_library(bidirectional, lengths, monkeypatch):
    monkeypatch.setattr(cudnn_rnn, "_MOST_CALLS", 1)
    case = gru.Case(9, 4, 5, 6, bidirectional=bidirectional, lengths=lengths)
    inputs, cotangents = gru.arrays(case)
    lens, _ = gru.rows_of(case)
    problem = gru.cudnn_problem(case, inputs, cotangents, lens, device="cpu")
    library = _FakeLibrary()
    monkeypatch.setattr(cudnn_rnn, "load", lambda: cudnn_rnn.Cudnn(library))
    ours, theirs = multiprocessing.Pipe()
    thread = threading.Thread(target=cudnn_worker._serve, args=(theirs,), daemon=True)
    thread.start()
    skipped, *candidates = map(str, problem.candidates())
    ours.send((problem, {skipped: "crashed"}))
    tried = list(iter(ours.recv, ("trying", candidates[-1])))
    assert tried == [("trying", candidate) for candidate in candidates[:-1]]
    kind, found = ours.recv()
    assert kind == "found"
    assert not library.failures
    for which in cudnn_rnn.PASSES:
        ours.send(which)
        kind, seconds = ours.recv()
        assert kind == "seconds"
        assert 0 < seconds < 60
    ours.close()
    thread.join()

    def expected_outputs(x, w, r, b, h):
        return jaxgrad.gru(x, w, r, b, lens, h, direction=gru.direction(case), linear_before_reset=True)

    outputs, pullback = jax.vjp(expected_outputs, *inputs)
    for which, expected in {"forward": outputs, "forward+backward": pullback(cotangents)}.items():
        for a, b in zip(found[which].outputs, expected, strict=True):  # float32, another order of summation
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        working = {name.split(",")[0] for name in found[which].times_ms}
        assert working == {"STANDARD", "PERSIST_STATIC_SMALL_H"}
        reasons = {name.split(",")[0]: reason for name, reason in found[which].failed.items()}
        assert reasons["PERSIST_DYNAMIC"] == "cudnnBuildRNNDynamic: CUDNN_STATUS_FAKE"
        assert "output 0 differs" in reasons["PERSIST_STATIC"]
        assert found[which].failed[skipped] == "crashed"


def test_candidates_that_end_their_process(monkeypatch):
    monkeypatch.setattr(cudnn_worker, "_serve", crashing_process.serve)
    worker = cudnn_worker.Worker()
    reasons = {number: f"ended the process with exit code {number}" for number in ("7", "8")}
    assert worker.measure(["a", "7", "b", "8"]) == reasons
    assert worker.measure(["7"]) == {"7": reasons["7"]}
    assert worker.measure(["a"]) == {"7": reasons["7"]}  # not tried again: it has crashed twice
    worker.close()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cuDNN does not start: ended the process with exit code 3"):
            worker.measure([])
