"""Failures of cuDNN and of the driver in batch normalization, with the fakes of fake_cuda.c. No GPU is needed.

Each failure is an error that names the call. The next run or program is right: an error that may pass is not
remembered.
"""

from __future__ import annotations

import pytest
from cuda_module import NEEDS_CUDA_MODULE

pytestmark = NEEDS_CUDA_MODULE

_STEP = """
import os
from fake_gpu import *

rng = np.random.default_rng(0)

class BatchNorm:
    "A forward pass and a backward pass with relu, each compiled, and whether they are right."

    def __init__(self, residual, planned=True):
        "planned: cuDNN sizes the workspace while the programs are lowered; otherwise it is an estimate."
        shape = (new_size(), 3, 8)
        arrays = [rng.standard_normal(size).astype(np.float32) for size in (shape, 8, 8, shape)]
        self.primals = arrays[: 3 + residual]
        self.cotangents = tuple(rng.standard_normal(size).astype(np.float32) for size in (shape, 8, 8))
        cuda.gpu_ordinal = lambda: 0 if planned else None
        self.forward, self.vjp = self.programs("cudnn")
        cuda.gpu_ordinal = lambda: 0
        forward, vjp = self.programs("xla")
        y, residuals = forward(*self.primals)
        self.expected = {"forward": y, "backward": vjp(residuals, self.cotangents)}
        self.residuals = jax.block_until_ready(self.forward(*self.primals))[1]  # so that no call meets a later failure

    def programs(self, implementation):
        def op(x, scale, bias, residual=None):
            return jaxgrad.batch_norm_training(
                x, scale, bias, residual=residual, activation="relu", implementation=implementation)

        forward = jax.jit(lambda *primals: jax.vjp(op, *primals)).lower(*self.primals)
        backward = jax.jit(lambda vjp, dy: vjp(dy)).lower(forward.out_info[1], self.cotangents)
        return forward.compile(), backward.compile()

    def run(self, which):
        'Returns "right", or the error. Raises AssertionError for wrong values.'
        try:
            if which == "forward":
                found, self.residuals = jax.block_until_ready(self.forward(*self.primals))
            else:
                found = jax.block_until_ready(self.vjp(self.residuals, self.cotangents))
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            return str(error)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(self.expected[which]), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
        return "right"
"""


@pytest.fixture
def run(on_fake_cuda):
    """Runs a script in a process of its own and returns the values that it passes to `report`."""
    return lambda script, **environment: on_fake_cuda(_STEP + script, **{"FAKE_BATCH_NORM": "1000"} | environment)


_STATUSES = (1001, 2000, 3000, 4000, 4001, 4003, 4004, 5000)
_UNSUPPORTED = (2000, 3000, 4001)  # bad parameter, not supported, compilation failed
_NO_MEMORY = (4003, 4004)  # of the host, of the device

# The calls of cuDNN in both passes, and of each pass.
_DESCRIBING = (
    "cudnnCreateTensorDescriptor",
    "cudnnSetTensor4dDescriptorEx",
    "cudnnDeriveBNTensorDescriptor",
    "cudnnCreateActivationDescriptor",
    "cudnnSetActivationDescriptor",
)
_FORWARD_SIZES = (
    "cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize",
    "cudnnGetBatchNormalizationTrainingExReserveSpaceSize",
)
_BACKWARD_SIZES = ("cudnnGetBatchNormalizationBackwardExWorkspaceSize",)
_FORWARD = (*_FORWARD_SIZES, "cudnnBatchNormalizationForwardTrainingEx")
_BACKWARD = (*_BACKWARD_SIZES, "cudnnBatchNormalizationBackwardEx")
_RUNNING = [
    *(("forward", name) for name in (*_DESCRIBING, *_FORWARD)),
    *(("backward", name) for name in (*_DESCRIBING, *_BACKWARD)),
]

_EVERY_RUN = """
def trials(function, statuses, which):
    "Lets each call of a function fail in turn while a program runs, and then runs it again."
    for status in statuses:
        for n in itertools.count(1):
            before = fake.fake_descriptors()
            fail(function, n, status)
            first = step.run(which)
            reached = fake.fake_calls() >= n
            fail(None)
            if not reached:
                break
            yield [status, n, first, fake.fake_descriptors() - before, step.run(which)]

step = BatchNorm({residual})
right = [step.run(which) for which in ("forward", "backward")]
report(right=right, found=list(trials({function!r}, {statuses}, {which!r})))
"""


@pytest.mark.parametrize("residual", [False, True], ids=["relu", "residual"])
@pytest.mark.parametrize(("which", "function"), _RUNNING)
def test_every_call_of_cudnn_fails_while_a_program_runs(run, which, function, residual):
    """An error that names the function; no descriptor is leaked, and the next run is right."""
    found = run(_EVERY_RUN.format(function=function, statuses=_STATUSES, which=which, residual=residual))
    assert found["right"] == ["right", "right"]
    if residual and which == "backward" and "Activation" in function:  # XLA computes the gradient of relu
        assert not found["found"]
        return
    assert {status for status, *_ in found["found"]} == set(_STATUSES)
    for status, n, first, leaked, again in found["found"]:
        context = status, n, first, leaked, again
        assert f"jaxgrad_cudnn_batch_norm_{which}: " in first, context
        assert f"(status {status}) in api().{function}(" in first, context
        assert ("memory of the host is full" in first) == (status == 4003), context
        assert ("the GPU's memory is full" in first) == (status == 4004), context
        assert first.startswith("RESOURCE_EXHAUSTED") == (status in _NO_MEMORY), context
        assert leaked == 0, context
        assert again == "right", context


@pytest.mark.parametrize(
    ("which", "function", "statuses"),
    [
        ("forward", "cuMemsetD32Async", (1, 2, 700)),
        *((which, "cudnnSetStream", (4000, 5000)) for which in ("forward", "backward")),
        *((which, "cuCtxGetCurrent", (1, 700)) for which in ("forward", "backward")),
        *((which, "cuCtxGetDevice", (1, 700)) for which in ("forward", "backward")),
        *((which, "cuStreamIsCapturing", (1, 700)) for which in ("forward", "backward")),
    ],
)
def test_calls_of_the_stream_and_the_driver_fail_while_a_program_runs(run, which, function, statuses):
    found = run(_EVERY_RUN.format(function=function, statuses=statuses, which=which, residual=True))
    assert found["found"]
    for status, n, first, leaked, again in found["found"]:
        context = status, n, first, leaked, again
        # The second call of cudnnSetStream, in a destructor, cannot raise.
        ignored = function == "cudnnSetStream" and n == 2
        assert first == "right" if ignored else f"status {status}" in first and function in first, context
        assert leaked == 0, context
        assert again == "right", context


_EVERY_CALL = """
def lowered(size):
    x, scale = jax.ShapeDtypeStruct((size, 3, 8), "float32"), jax.ShapeDtypeStruct((8,), "float32")

    def op(x, scale, bias):
        residual = x if {residual} else None
        return jaxgrad.batch_norm_training(
            x, scale, bias, residual=residual, activation="relu", implementation="cudnn")

    return jax.jit(op).lower(x, scale, scale) and "lowered"

def trials(function, statuses):
    "Lets each call of a function fail in turn while a program is lowered, and then lowers it again."
    for status in statuses:
        for n in itertools.count(1):
            size, before = new_size(), fake.fake_descriptors()
            fail(function, n, status)
            first = outcome(lowered, size)
            reached = fake.fake_calls() >= n
            fail(None)
            if not reached:
                break
            yield [status, n, first, fake.fake_descriptors() - before, outcome(lowered, size)]

report(found=list(trials({function!r}, {statuses})))
"""


@pytest.mark.parametrize("residual", [False, True], ids=["relu", "residual"])
@pytest.mark.parametrize("function", [*_DESCRIBING, *_FORWARD_SIZES, *_BACKWARD_SIZES])
def test_every_call_of_cudnn_fails_while_a_program_is_lowered(run, function, residual):
    """An error that may pass is raised, names the function, and is not remembered. Missing support is remembered."""
    found = run(_EVERY_CALL.format(function=function, statuses=_STATUSES, residual=residual))["found"]
    assert {status for status, *_ in found} == set(_STATUSES)
    for status, n, first, leaked, again in found:
        context = status, n, first, leaked, again
        assert leaked == 0, context
        if status in _UNSUPPORTED:
            assert first.startswith("ValueError: "), context
            assert "cuDNN does not support this call" in first, context
            assert again == first, context
        else:
            assert first.startswith("RuntimeError: "), context
            assert f"(status {status}) in api().{function}(" in first, context
            assert ("memory is full" in first or "memory of the host" in first) == (status in _NO_MEMORY), context
            assert again == "lowered", context


def test_the_default_runs_on_xla_where_cudnn_fails(on_fake_cuda):
    """The reason names the function, and is not remembered."""
    found = on_fake_cuda(
        """
import ctypes, json
import jax, jaxgrad
from jaxgrad._src.native import cuda
from preferring import preferring

preferring("batch_norm", "some thousand rows", "cudnn").start()
cuda.gpu_ordinal = lambda: 0
cuda.nvrtc_unavailable = lambda: "switched off"  # without it, cuDNN is the next choice
fake = ctypes.CDLL("libcuda.so.1")
x, scale = jax.ShapeDtypeStruct((1568, 256), "bfloat16"), jax.ShapeDtypeStruct((256,), "float32")

def explained():
    call = jaxgrad.batch_norm_training, x, scale, scale
    found = jaxgrad.explain(*call, activation="relu", platform="gpu")
    return found.implementation, found.reason

def lowered():
    op = jax.jit(lambda *arrays: jaxgrad.batch_norm_training(*arrays, activation="relu"))
    return op.trace(x, scale, scale).lower(lowering_platforms=("cuda",)).as_text()

def calls_cudnn():
    return "@jaxgrad_cudnn_batch_norm_forward" in lowered()

fake.fake_fail(b"cudnnCreateTensorDescriptor", 0, 4000)
failing = calls_cudnn(), *explained()
fake.fake_fail(None, 0, 0)
print(json.dumps([failing, [calls_cudnn(), *explained()]]))
""",
        FAKE_BATCH_NORM="1000",
    )
    (calls_cudnn, implementation, reason), later = found
    assert (calls_cudnn, implementation) == (False, "xla")
    assert reason.startswith("cuDNN failed: ")
    assert "(status 4000) in api().cudnnCreateTensorDescriptor(" in reason
    assert later[:2] == [True, "cudnn"]


@pytest.mark.parametrize("function", ["cudnnCreate", "cudnnSetStream", "cuStreamCreate"])
def test_a_handle_that_cannot_be_made_while_a_program_is_lowered(run, function):
    """The error names the function; the next program gets a handle."""
    found = run(_EVERY_CALL.format(function=function, statuses=(1001,), residual=False))["found"]
    assert len(found) == 1
    _, n, first, leaked, again = found[0]
    assert (n, leaked, again) == (1, 0, "lowered")
    assert first.startswith("RuntimeError: ")
    assert "status 1001" in first
    assert function in first


_DEVICE_FAULT = """
step = BatchNorm(residual=False)
fake.fake_fault_at_failure(700)
fail({function!r}, 1, 5000)
fault = step.run({which!r})
fail(None)
later = step.run({which!r})
fake.fake_fault(0)  # which no GPU can do
report(fault=fault, later=later, again=step.run({which!r}))
"""


@pytest.mark.parametrize(("which", "function"), _RUNNING)
def test_a_fault_of_the_device_is_not_batch_norms(run, which, function):
    """The fault of an earlier kernel: the error says so before it names the call that met it."""
    found = run(_DEVICE_FAULT.format(which=which, function=function))
    for error in (found["fault"], found["later"]):
        assert f"jaxgrad_cudnn_batch_norm_{which}: an operation that ran on the GPU before this call failed" in error
        assert "an illegal memory access (status 700); then " in error
    assert f"(status 5000) in api().{function}(" in found["fault"]
    assert "(status 700) in api().cuStreamIsCapturing(" in found["later"]  # the first call of the driver
    assert found["again"] == "right"


def test_a_fault_of_the_device_while_a_program_is_lowered(run):
    found = run(
        _EVERY_CALL.format(function="cudnnCreateTensorDescriptor", statuses=(), residual=False)
        + """
first = lowered(new_size())
fake.fake_fault(700)
fail("cudnnCreateTensorDescriptor", 1, 5000)
report(first=first, fault=outcome(lowered, new_size()))
"""
    )
    assert found["first"] == "lowered"
    assert "an operation that ran on the GPU before this call failed" in found["fault"]
    assert "an illegal memory access (status 700)" in found["fault"]


@pytest.mark.parametrize(("which", "function"), [*_RUNNING, ("forward", "cuMemsetD32Async")])
def test_an_error_while_a_stream_is_captured(run, which, function):
    """The error is returned as it is: a query of the device would end the capture."""
    found = run(
        f"""
step = BatchNorm(residual=False)
fake.fake_capture(1)
fail({function!r}, 1, 4004)
error = step.run({which!r})
fail(None)
report(error=error, again=step.run({which!r}))
"""
    )
    assert "(status 4004) in " in found["error"]
    assert function in found["error"]
    assert "memory is full" not in found["error"]
    assert found["again"] == "right"


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_a_call_with_more_workspace_than_the_program_has(run, which):
    """A program that was lowered without a GPU: XLA lends the memory, except to a CUDA graph."""
    found = run(f"""
step = BatchNorm(residual=False, planned=False)
found = [step.run({which!r}), calls.fake_scratch_bytes()]
os.environ["FAKE_BATCH_NORM"] = str(32 << 20)
found += [step.run({which!r}), calls.fake_scratch_bytes()]
fake.fake_capture(1)
captured = step.run({which!r})
fake.fake_capture(0)
calls.fake_scratch_limit(1 << 20)
report(found=found, captured=captured, full=step.run({which!r}))
""")
    assert found["found"] == ["right", 0, "right", 32 << 20]
    assert "bytes, 33554432 are needed" in found["captured"]
    assert "RESOURCE_EXHAUSTED" in found["full"]
    assert "33554432 bytes of workspace" in found["full"]
