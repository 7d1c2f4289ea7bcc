"""What a failure of cuDNN, of the driver or of memory leads to, with the fakes of fake_cuda.c. No GPU is needed.

A failure ends in a clear error, or in another engine with the same program and the right values. What may pass is not
remembered.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from cuda_module import NEEDS_CUDA_MODULE

pytestmark = NEEDS_CUDA_MODULE


@pytest.fixture
def run(on_fake_cuda):
    """Runs a script in a process of its own and returns the values that it passes to `report`."""
    return lambda script, **environment: on_fake_cuda("import os\nfrom fake_gpu import *\n" + script, **environment)


_FAILED_PLAN = """
step = Step(gradients=False)
found = [step.run(), fake.fake_engine()]
fail("cudnnBackendExecute", 1, {status})
found += [step.run(), fake.fake_engine(), fake.fake_calls()]
fail(None)
report(found=[*found, step.run(), fake.fake_engine()])
"""


@pytest.mark.parametrize("status", [2000, 3000, 4000, 5000])
def test_a_plan_that_fails_to_run_is_replaced(run, status):
    found = run(_FAILED_PLAN.format(status=status))["found"]
    assert found == ["right", 12, "right", 11, 2, "right", 11]


@pytest.mark.parametrize("status", [4003, 4004])
def test_a_plan_that_lacks_memory_is_kept(run, status):
    """Another engine runs this time only."""
    found = run(_FAILED_PLAN.format(status=status))["found"]
    assert found == ["right", 12, "right", 11, 2, "right", 12]
    assert run(_FAILED_PLAN.format(status=5000), FAKE_FREE="1000")["found"][-1] == 12


def test_a_fault_of_the_device_is_not_the_plans(run):
    """The fault of an earlier kernel: one error that says so, no other engine is built, and the plan is kept."""
    found = run("""
step = Step(gradients=False)
first = [step.run(), fake.fake_engine(), jaxgrad.plan_cache_info()["cudnn"]]
fake.fake_fault(700)
step_on_miss = outcome(engine, new_size())
later = step.run()
fake.fake_fault(0)  # which no GPU can do
fake.fake_fault_at_failure(700)
fail("cudnnBackendExecute", 1, 5000)
error = [step.run(), fake.fake_calls()]
fake.fake_fault(0)
fail("cudnnBackendFinalize", 1, 5000)
on_build = [step.run(), fake.fake_calls()]
fake.fake_fault(0)
report(first=first, error=error, miss=step_on_miss, again=[step.run(), fake.fake_engine(),
       jaxgrad.plan_cache_info()["cudnn"]["misses"] - first[2]["misses"]], on_build=on_build, later=later)
""")
    assert found["first"][:2] == ["right", 12]
    assert found["on_build"][1] == 1  # the arguments of the call; no plan
    for error in (found["error"][0], found["on_build"][0], found["miss"], found["later"]):
        assert "an operation that ran on the GPU before this call failed" in error
        assert "an illegal memory access (status 700)" in error
        assert ("status 5000" in error) == (error != found["later"])
    assert found["again"] == ["right", 12, 1]


@pytest.mark.parametrize("status", [900, 904, 908])
def test_a_capture_of_another_stream_is_not_a_fault(run, status):
    """The query of the device fails because of the capture: an engine that cannot be built is replaced all the same."""
    found = run(f"""
os.environ["FAKE_REFUSES"] = "12:5000"
fail("cuStreamQuery", 0, {status})
capture = [outcome(engine, new_size()), fake.fake_calls() > 0]
fail("cuStreamQuery", 0, 700)
report(capture=capture, fault=outcome(engine, new_size()))
""")
    assert found["capture"] == [["engine 13", 300], True]
    assert "an illegal memory access (status 700)" in found["fault"]


def test_an_error_while_a_stream_is_captured(run):
    """The error is returned as it is: the context is not asked, and no other plan is tried."""
    found = run("""
step = Step(gradients=False)
step.run()
fake.fake_capture(1)
fail("cudnnBackendExecute", 1, 5000)
error = [step.run(), fake.fake_calls()]
fail(None)
captured = step.run(), jaxgrad.plan_cache_info()["cudnn"]["recorded"]
cold = Step(planned=False, gradients=False)
fail("cudnnBackendFinalize", 0, 5000)
cold_error = cold.run()
fail(None)
report(error=error, captured=captured, cold_error=cold_error, cold=cold.run(), engine=fake.fake_engine())
""")
    assert "status 5000" in found["error"][0]
    assert found["error"][1] == 1
    assert found["captured"] == ["right", 1]
    assert "status 5000" in found["cold_error"]
    assert found["cold"] == "right"
    assert found["engine"] == 11  # nothing was timed


_CUDNN_STATUSES = (1001, 2000, 3000, 4000, 4001, 4003, 4004, 5000)
_LASTING = (2000, 3000, 4001)  # bad parameter, not supported, compilation failed
_DRIVER_STATUSES = (1, 2, 700)  # invalid value, out of memory, illegal address

# Functions with many calls, each of which fails with one status. Calls of other functions fail with each status.
_MANY_CALLS = (
    "cudnnBackendCreateDescriptor",
    "cudnnBackendFinalize",
    "cudnnBackendGetAttribute",
    "cudnnBackendSetAttribute",
    "cudnnSetStream",
)

# The function with the most calls, and the step from a call that fails to the next: half a minute for all of them.
_MOST_CALLS = [
    ("cudnnBackendCreateDescriptor", 5),
    pytest.param("cudnnBackendCreateDescriptor", 1, marks=pytest.mark.thorough),
]

_TRIALS = """
def trials(function, statuses, new_attempt):
    "Lets each call of a function fail in turn during an attempt, and then makes the same attempt again."
    for n in itertools.count(1, {step}):
        for status in [statuses[n % len(statuses)]] if function in {many_calls} else statuses:
            attempt = new_attempt()
            fail(function, n, status)
            first = attempt()
            reached = fake.fake_calls() >= n
            fail(None)
            if not reached:
                return
            yield [status, n, first, attempt()]
"""

_EVERY_CALL = (
    _TRIALS
    + """
def new_plan():
    size = new_size()
    return lambda: outcome(engine, size, {search!r})

report(found=list(trials({function!r}, {statuses}, new_plan)), other=engine(new_size(), {search!r}))
"""
)


def _fail_while_a_plan_is_made(run, function, statuses, search, step=1):
    settings = {"function": function, "statuses": statuses, "search": search, "step": step}
    found = run(_EVERY_CALL.format(**settings, many_calls=_MANY_CALLS))
    assert found["found"]
    return found


@pytest.mark.parametrize("search", ["heuristic", "exhaustive"])
@pytest.mark.parametrize(
    ("function", "step"),
    [
        *_MOST_CALLS,
        ("cudnnBackendSetAttribute", 1),
        ("cudnnBackendFinalize", 1),
        ("cudnnBackendGetAttribute", 1),
        ("cudnnBackendExecute", 1),
        ("cudnnCreate", 1),
        ("cudnnSetStream", 1),
    ],
)
def test_every_call_of_cudnn_fails_while_a_plan_is_made(run, function, step, search):
    """An error that may pass is raised, or another engine is timed; neither changes the program."""
    found = _fail_while_a_plan_is_made(run, function, _CUDNN_STATUSES, search, step)
    expected = ["engine 12", 300] if search == "exhaustive" else ["engine 11", 200]
    assert found["other"] == expected
    for status, n, first, again in found["found"]:
        context = status, n, first, again
        if isinstance(first, str):
            assert first.startswith("RuntimeError: "), context
            assert f"status {status}" in first, context
            assert function in first, context
            assert again == expected, context
        elif status not in _LASTING:
            assert first is not None, context
            assert first[1] == expected[1], context
            assert first == expected or search == "exhaustive", context
            assert again == first, context


@pytest.mark.parametrize(
    "function",
    [
        "cuCtxPushCurrent_v2",
        "cuDeviceGet",
        "cuDeviceGetAttribute",
        "cuDeviceGetName",
        "cuDevicePrimaryCtxRetain",
        "cuDeviceTotalMem_v2",
        "cuDriverGetVersion",
        "cuEventCreate",
        "cuEventElapsedTime",
        "cuEventRecord",
        "cuEventSynchronize",
        "cuLaunchKernel",
        "cuMemAlloc_v2",
        "cuMemcpyDtoHAsync_v2",
        "cuMemcpyHtoDAsync_v2",
        "cuMemsetD32Async",
        "cuModuleGetFunction",
        "cuModuleLoadData",
        "cuStreamCreate",
        "cuStreamSynchronize",
        "cuThreadExchangeStreamCaptureMode",
    ],
)
def test_every_call_of_the_driver_fails_while_a_plan_is_made(run, function):
    found = _fail_while_a_plan_is_made(run, function, _DRIVER_STATUSES, "exhaustive")
    assert found["other"] == ["engine 12", 300]
    for status, n, first, again in found["found"]:
        context = status, n, first, again
        if isinstance(first, str):
            assert first.startswith("RuntimeError: "), context
            assert f"status {status}" in first, context
            assert function.removesuffix("_v2") in first, context
            assert again == ["engine 12", 300], context
        else:  # in a destructor, or without memory, which candidates are not timed for
            assert first == again, context
            assert first == ["engine 12", 300] or (status == 2 and first == ["engine 11", 300]), context


_EVERY_RUN = (
    _TRIALS
    + """
report(found=list(trials({function!r}, {statuses}, lambda: Step(planned={planned}, gradients=False).run)))
"""
)


@pytest.mark.parametrize("planned", [True, False], ids=["planned", "unplanned"])
@pytest.mark.parametrize(
    ("function", "step"),
    [
        *_MOST_CALLS,
        ("cudnnBackendExecute", 1),
        ("cudnnBackendFinalize", 1),
        ("cudnnSetStream", 1),
        ("cuCtxGetCurrent", 1),
        ("cuCtxGetDevice", 1),
        ("cuStreamGetCtx", 1),
        ("cuStreamIsCapturing", 1),
    ],
)
def test_every_call_fails_while_a_program_runs(run, function, step, planned):
    """An error, or right values; the next run is right. Plans are made before or in the run."""
    statuses = _CUDNN_STATUSES if function.startswith("cudnn") else (1, 700)
    settings = {"function": function, "statuses": statuses, "planned": planned, "step": step}
    script = _EVERY_RUN.format(**settings, many_calls=_MANY_CALLS)
    found = run(script, FAKE_CONTEXT=str(int(function != "cuStreamGetCtx")))["found"]
    assert found
    for status, n, first, again in found:
        unsupported = status == 3000 and "cuDNN has no plan" in first
        assert first == "right" or f"status {status}" in first or unsupported, (status, n, first)
        assert again == "right", (status, n, first, again)
    if function == "cudnnBackendExecute":
        assert all(first == "right" for _, _, first, _ in found)


def test_gradients_are_right_and_descriptors_are_freed(run):
    """The fake computes what cuDNN does, on every path of the other tests."""
    found = run("""
steps = [Step(planned=planned) for planned in (True, False)]
before = [step.run() for step in steps] and fake.fake_descriptors()
report(found=[step.run() for step in steps], freed=fake.fake_descriptors() == before)
""")
    assert found == {"found": ["right", "right"], "freed": True}


def test_every_candidate_fails_with_an_error_that_may_pass(run):
    """It is no missing support: forced calls raise RuntimeError, and later calls run on cuDNN."""
    found = run("""
x, w = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((2, 9, 8, 4), (6, 3, 2, 4)))
settings = {**SETTINGS, "feature_group_count": 1, "rhs_dilation": (1, 1)}

def explained():
    call = jaxgrad.conv_general_dilated, x, w
    return str(jaxgrad.explain(*call, **settings, implementation="cudnn", platform="cpu"))

os.environ["FAKE_REFUSES"] = "11:4000,12:5000,13:3000"
forced = outcome(explained)
del os.environ["FAKE_REFUSES"]
report(forced=forced, later=outcome(explained))
""")
    assert found["forced"].startswith("RuntimeError: jaxgrad.conv_general_dilated: implementation='cudnn' cannot run")
    assert "status 4000" in found["forced"]
    assert "forced by implementation='cudnn'" in found["later"]


def test_a_failure_to_ask_for_the_free_memory_does_not_hide_the_error(run):
    """The memory is full, and no engine can be built. Without an answer, the error of cuDNN does not say so."""
    full, unknown, calls = run(
        """
os.environ["FAKE_REFUSES"] = "11:5000,12:5000,13:5000"
full = outcome(engine, new_size())
fail("cuMemGetInfo_v2", 0, 1)
report(found=[full, outcome(engine, new_size()), fake.fake_calls()])
""",
        FAKE_FREE="1000",
    )["found"]
    assert "the GPU's memory is full" in full
    assert "status 5000" in unknown
    assert "memory is full" not in unknown
    assert calls


_MISSING = """
import json
from jaxgrad._src.native import cuda

def error(function, *args):
    try:
        return function(*args) or ""
    except RuntimeError as raised:
        return str(raised)

print(json.dumps([error(cuda.module.total_memory, 0), cuda.cudnn_unavailable(), error(cuda.nvrtc_unavailable)]))
"""


@pytest.mark.parametrize(
    ("function", "index", "message"),
    [
        ("cuStreamQuery", 0, "the CUDA driver has no function cuStreamQuery"),
        ("cudnnBackendExecute", 1, "the cuDNN that was found has no function cudnnBackendExecute"),
        ("nvrtcGetCUBIN", 2, "the NVRTC that was found has no function nvrtcGetCUBIN"),
    ],
)
def test_a_library_without_a_function(run_python, fake_cuda, tmp_path, function, index, message):
    source = Path(__file__).parents[1] / "fake_cuda.c"
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", f"-D{function}=removed", "-o", library, source], check=True)
    for name in ("libcudnn.so.9", "libnvrtc.so.13"):
        (tmp_path / name).symlink_to(library)
    done = run_python(_MISSING, LD_LIBRARY_PATH=str(tmp_path), JAX_PLATFORMS="cpu")
    assert json.loads(done.stdout)[index] == message


@pytest.mark.parametrize(("status", "message"), [(100, "finds no usable GPU"), (0, "")])
def test_a_driver_that_does_not_start(run_python, fake_cuda, status, message):
    environment = {"LD_LIBRARY_PATH": str(fake_cuda), "FAKE_FAIL": f"cuInit:1:{status}", "JAX_PLATFORMS": "cpu"}
    found = json.loads(run_python(_MISSING, **environment).stdout)[0]
    assert message in str(found)


@pytest.mark.parametrize("status", [1, 2, 11])
def test_a_failure_of_nvrtc_that_may_pass_is_not_remembered(run, status):
    """Out of memory, program creation failure, internal error. A program that does not compile stays missing."""
    script = """
from jaxgrad._src.conv.call.weight_transpose import transpose_unavailable
fail("nvrtcCompileProgram", 1, STATUS)
first = outcome(transpose_unavailable, 0)
fail("cuModuleLoadData", 1, 2)
second = outcome(transpose_unavailable, 0)
fail(None)
report(found=[first, second, outcome(transpose_unavailable, 0)])
"""
    first, second, last = run(script.replace("STATUS", str(status)))["found"]
    assert first.startswith("RuntimeError: NVRTC")
    assert second.startswith("RuntimeError: CUDA: out of memory")
    assert last == ""
    first, _, last = run(script.replace("STATUS", "6"))["found"]
    assert first == last != ""
    assert "NVRTC_ERROR_COMPILATION" in first
