"""Failures of the driver and of NVRTC in calls of jaxgrad's own CUDA kernels, with the fakes of fake_cuda.c.

No GPU is needed. Each failure is an error that names the function. The next program or run succeeds. The fakes do not
compute the kernels.
"""

from __future__ import annotations

import pytest
from cuda_module import NEEDS_CUDA_MODULE

pytestmark = NEEDS_CUDA_MODULE

_PROGRAMS = """
from fake_gpu import *

FIRST_HIDDEN = {"block": 4, "cluster": 128, "team": 300}  # hidden units, by what holds the recurrent weights

def lowered(kind, size):
    "A value and its gradients."
    if kind == "depthwise":
        shapes = (2, 20, 12, 32), (1 + size // 7, 2 + size % 7, 1, 32)  # each window has kernels of its own
        settings = dict(window_strides=(1, 1), padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
                        feature_group_count=32)
        op = lambda x, w: jaxgrad.conv_general_dilated(x, w, **settings, implementation="cuda")
    elif kind == "transpose":  # of the weight gradient of cuDNN
        shapes = (1, 5, 4, 4), (3, 2 + size, 4, 8)
        settings = dict(window_strides=(1, 1), padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        op = lambda x, w: jaxgrad.conv_general_dilated(x, w, **settings, implementation="cudnn")
    else:
        H = FIRST_HIDDEN[kind] + size
        shapes = (4, 3, 5), (1, 3 * H, 5), (1, 3 * H, H)
        op = lambda x, w, r: jaxgrad.gru(x, w, r, implementation="cuda")[0]
    arrays = [np.ones(shape, np.float32) for shape in shapes]
    value = lambda *arrays: jnp.sum(jnp.sin(op(*arrays)))
    return jax.jit(jax.value_and_grad(value, tuple(range(len(arrays))))).lower(*arrays), arrays
"""


@pytest.fixture
def run(on_fake_cuda):
    """Runs a script in a process of its own and returns the values that it passes to `report`."""
    return lambda script: on_fake_cuda(_PROGRAMS + script)


_EVERY_KIND = ("depthwise", "block", "cluster", "team")
_GRU_KINDS = _EVERY_KIND[1:]
_STATUSES = (1, 2, 700)  # invalid value, out of memory, illegal address
_NVRTC_STATUSES = (1, 2, 11)  # out of memory, program creation failure, internal error: those that may pass

_EVERY_CALL = """
def trial(n, status):
    "Lets the n-th call of a function fail while a program is lowered, or every call with n = 0."
    before = fake.fake_modules()
    fail({function!r}, n, status)
    error = outcome(lambda: lowered({kind!r}, new_size()) and "lowered")
    fail(None)
    return [status, error, fake.fake_modules() - before]

every = [trial(0, status) for status in {statuses}]
second = trial(2, {statuses}[0])
report(every=every, second=second[1], later=outcome(lambda: lowered({kind!r}, new_size()) and "lowered"))
"""


def _cases(functions):
    """One kind of kernel for each function in turn; the others are marked `thorough`."""
    cases = []
    for number, (name, kinds) in enumerate(functions.items()):
        for kind in kinds:
            marks = () if kind == kinds[number % len(kinds)] else pytest.mark.thorough
            cases.append(pytest.param(name, kind, id=f"{name}-{kind}", marks=marks))
    return cases


@pytest.mark.parametrize(
    ("function", "kind"),
    _cases(
        {
            "cuCtxGetCurrent": _EVERY_KIND,
            "cuCtxPushCurrent_v2": _EVERY_KIND,
            "cuDeviceGet": _EVERY_KIND,
            "cuDeviceGetAttribute": _EVERY_KIND,
            "cuDevicePrimaryCtxRetain": _EVERY_KIND,
            "cuFuncGetAttribute": _GRU_KINDS,
            "cuFuncSetAttribute": ("depthwise", "cluster", "team"),
            "cuModuleGetFunction": _EVERY_KIND,
            "cuModuleLoadData": _EVERY_KIND,
            "cuOccupancyMaxActiveBlocksPerMultiprocessor": ("depthwise", "block", "team"),
            "cuOccupancyMaxActiveClusters": ("cluster",),
            "cuThreadExchangeStreamCaptureMode": _EVERY_KIND,
            "nvrtcCompileProgram": _EVERY_KIND,
            "nvrtcCreateProgram": _EVERY_KIND,
            "nvrtcGetCUBIN": _EVERY_KIND,
            "nvrtcGetCUBINSize": _EVERY_KIND,
        }
    ),
)
def test_every_call_fails_while_a_program_is_lowered(run, function, kind):
    """The error is raised and not remembered, and no module stays loaded."""
    is_nvrtc = function.startswith("nvrtc")
    statuses = _NVRTC_STATUSES if is_nvrtc else _STATUSES
    found = run(_EVERY_CALL.format(function=function, kind=kind, statuses=statuses))
    named = " for sm_90" if function == "nvrtcCompileProgram" else f" in {function}" if is_nvrtc else function
    named = named.removesuffix("_v2")
    for status, error, modules in found["every"]:
        context = status, error, modules
        assert error.startswith("RuntimeError: "), context
        assert named in error, context
        assert ("NVRTC: NVRTC_ERROR" if is_nvrtc else f"(status {status}) in ") in error, context
        assert modules == 0, context
    assert found["second"].startswith("RuntimeError: ")
    assert named in found["second"]
    assert found["later"] == "lowered"


_RUN = """
program, arrays = lowered({kind!r}, new_size())
program = program.compile()

def ran():
    try:
        return jax.block_until_ready(program(*arrays)) and "ran"
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        return str(error)
"""

_EVERY_RUN = (
    _RUN
    + """
def trials(function, statuses):
    "Lets each call of a function fail in turn while a program runs, and then runs it again."
    for status in statuses:
        for n in itertools.count(1):
            fail(function, n, status)
            first = ran()
            reached = fake.fake_calls() >= n
            fail(None)
            fake.fake_fault(0)  # which no GPU can do
            if not reached:
                break
            yield [status, n, first, ran()]

fake.fake_fault_at_failure({fault})
fake.fake_capture({captured})
report(found=list(trials({function!r}, {statuses})))
"""
)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(
    ("function", "kind"),
    _cases(
        {
            "cuCtxGetCurrent": _EVERY_KIND,
            "cuCtxGetDevice": _EVERY_KIND,
            "cuLaunchKernel": ("depthwise",),
            "cuLaunchKernelEx": _GRU_KINDS,
            "cuMemsetD32Async": ("team",),
            "cuStreamIsCapturing": _EVERY_KIND,
        }
    ),
)
def test_every_call_fails_while_a_program_runs(run, function, kind, captured):
    """The error names the handler and the function. While a stream is captured, a query would end the capture."""
    found = run(_EVERY_RUN.format(function=function, kind=kind, statuses=_STATUSES, fault=0, captured=int(captured)))
    passes = 3 if kind == "depthwise" else 2
    assert len(found["found"]) >= passes * len(_STATUSES)
    target = "jaxgrad_cuda_depthwise_" if kind == "depthwise" else "jaxgrad_cuda_gru_"
    for status, n, first, again in found["found"]:
        context = status, n, first, again
        assert target in first, context
        assert f"(status {status}) in " in first, context
        assert f"{function}(" in first, context
        assert again == "ran", context


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(
    ("function", "kind"),
    _cases(
        {
            "cuLaunchKernel": ("depthwise", "transpose"),
            "cuLaunchKernelEx": _GRU_KINDS,
            "cuMemsetD32Async": ("team",),
            "cuStreamIsCapturing": (*_EVERY_KIND, "transpose"),
        }
    ),
)
def test_a_fault_of_the_device_is_not_the_kernels(run, function, kind, captured):
    """The fault of an earlier kernel: the error says so before it names the call that met it.

    The fake driver reports the fault in place of the capture, which the fault has ended.
    """
    found = run(_EVERY_RUN.format(function=function, kind=kind, statuses=(700,), fault=700, captured=int(captured)))
    api = "" if function == "cuStreamIsCapturing" else "driver::"
    assert found["found"]
    for _, n, first, again in found["found"]:
        context = n, first, again
        assert ("jaxgrad_cudnn_conv_" if kind == "transpose" else "jaxgrad_cuda_") in first, context
        assert ": an operation that ran on the GPU before this call failed, " in first, context
        assert ": CUDA: an illegal memory access (status 700); then CUDA: " in first, context
        assert f"CUDA: an illegal memory access (status 700) in {api}api().{function}(" in first, context
        assert again == "ran", context


@pytest.mark.parametrize("status", [900, 904, 908])
@pytest.mark.parametrize("kind", ["depthwise", "team", "transpose"])
def test_an_error_of_capture_is_no_fault_of_the_device(run, kind, status):
    """The error is returned as it is: a query of the device would end the capture, of which the status is not known."""
    found = run(
        _RUN.format(kind=kind)
        + f"""
fake.fake_capture(1)
fail("cuStreamIsCapturing", 0, {status})
first = ran()
fail(None)
report(first=first, again=ran())
"""
    )
    assert f"(status {status}) in api().cuStreamIsCapturing(" in found["first"]
    assert "an operation that ran on the GPU before this call failed" not in found["first"]
    assert found["again"] == "ran"
