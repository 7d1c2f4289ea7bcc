"""How plans are selected, stored on disk and rejected, with the fake cuDNN of fake_cuda.c. No GPU is needed."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cuda_module import ENGINES, NEEDS_CUDA_MODULE

pytestmark = NEEDS_CUDA_MODULE

_PRELUDE = """
import ctypes, json, os, sys, warnings
import jax, jax.numpy as jnp
fake = ctypes.CDLL("libcudnn.so.9")
import jaxgrad
from jaxgrad import config
from jaxgrad._src.native import cuda
from jaxgrad._src.conv.kernels.cudnn_plan import Epilogue, cudnn_plan

cuda.gpu_ordinal = lambda: 0  # JAX itself runs on the CPU
config.update(search="exhaustive")
LAST = ("NHWC", "HWIO", "NHWC")

def arguments(size=8, dtype="float32"):
    return jax.ShapeDtypeStruct((2, size, size, 4), dtype), jax.ShapeDtypeStruct((3, 3, 4, 4), dtype)

SETTINGS = {"window_strides": (1, 1), "padding": ((2, 0), (2, 0)), "dimension_numbers": LAST}

def lowered(size=8, dtype="float32", implementation="cudnn"):
    def call(x, w):
        return jaxgrad.conv_general_dilated(x, w, **SETTINGS, implementation=implementation)
    return jax.jit(call).trace(*arguments(size, dtype)).lower(lowering_platforms=("cuda",)).as_text()

def engine(size=8, dtype="float32", epilogue=Epilogue(), **changes):
    "The engine of a forward call, and the bytes of its workspace."
    from jaxgrad._src.conv.call.geometry import ConvGeometry
    from jaxgrad._src.conv.call.problem import ConvProblem
    spec = (0, 3, 1, 2)
    g = ConvGeometry(spec, (3, 2, 0, 1), spec, (1, 1), ((2, 0), (2, 0)), (1, 1), 1, (size, size), (3, 3))
    with config.override(**changes):
        problem = ConvProblem(g, 2, 4, 4, jnp.dtype(dtype))
        plan = cudnn_plan("forward", problem, True, config.current(), epilogue)
    return None if plan is None else [plan.engine, plan.workspace]

def counts():
    info = jaxgrad.plan_cache_info()["cudnn"]
    return [fake.fake_executions(), info["disk_hits"], info["disk_misses"]]

def report(**found):
    print(json.dumps(found))
"""


@pytest.fixture
def run(on_fake_cuda):
    """Runs a script in a process of its own and returns the values that it passes to `report`."""

    def run(script, engines=ENGINES, **environment):
        return on_fake_cuda(_PRELUDE + script, FAKE_ENGINES=engines, **environment)

    return run


_ONE = "report(engine=engine(), counts=counts(), text=lowered())"


def _files(directory):
    """The results of the search; verdicts on engines are in files of their own."""
    return {path.name: path.read_bytes() for path in Path(directory).glob("*.plan")}


def test_a_choice_persists_across_processes(run, tmp_path):
    """Candidates are timed once; later processes read the choice from disk. The program is always the same."""
    kept = {"JAXGRAD_PLAN_CACHE_DIR": str(tmp_path / "new" / "directory")}
    alone = run(_ONE)
    first = run(_ONE, **kept)
    files = _files(kept["JAXGRAD_PLAN_CACHE_DIR"])
    second = run(_ONE, PYTHONHASHSEED="1", **kept)  # no fork: other hashes and addresses
    slower = run(_ONE, ENGINES.replace("200:10", "200:99"), **kept)
    assert alone["engine"] == first["engine"] == second["engine"] == slower["engine"] == ["engine 12", 300]
    assert alone["counts"][0] == first["counts"][0] > 0
    assert alone["counts"][1:] == [0, 0]
    assert first["counts"][1:] == [0, 1]
    assert second["counts"] == slower["counts"] == [0, 1, 0]
    assert "tensor<300xui8>" in alone["text"]
    assert alone["text"] == first["text"] == second["text"] == slower["text"]
    assert files == _files(kept["JAXGRAD_PLAN_CACHE_DIR"])
    assert len(files) == 3  # one for each pass
    assert {text.splitlines()[-1] for text in files.values()} == {b"1 eng12_k7=1"}  # place, engine, knobs


def test_execution_reuses_the_choice_of_the_lowering(run, tmp_path):
    """The workspace is the one that the lowering reserved, not the limit at that time."""
    kept = {"JAXGRAD_PLAN_CACHE_DIR": str(tmp_path)}
    assert run("report(found=engine(), counts=counts())", **kept)["counts"][1:] == [0, 1]
    found = run("report(found=engine(workspace_limit=300), counts=counts())", **kept)
    assert found == {"found": ["engine 12", 300], "counts": [0, 1, 0]}


@pytest.mark.parametrize("kept", [False, True])
def test_devices_of_one_model_share_a_choice(run, tmp_path, kept):
    """Candidates are timed on the device of the lowering. Other devices request the plan while XLA records the
    program, when timing is impossible."""
    script = """
def on(device):
    cuda.gpu_ordinal = lambda: device
    cudnn_plan.cache_clear()
    return [engine(), counts()]
found = [on(0), on(1)]
os.environ["FAKE_NAME"] = "Another GPU"
report(found=[*found, on(2)])
"""
    (first, timed), (second, as_timed), (third, timed_again) = run(
        script, **({"JAXGRAD_PLAN_CACHE_DIR": str(tmp_path)} if kept else {})
    )["found"]
    assert first == second == third == ["engine 12", 300]
    assert as_timed == timed
    assert timed_again[0] == 2 * timed[0] > 0


def test_the_key_holds_everything_that_affects_timing(run, tmp_path):
    kept = {"JAXGRAD_PLAN_CACHE_DIR": str(tmp_path)}
    run("engine(); report()", **kept)
    for call, environment in (
        ("engine(size=9)", {}),
        ("engine(dtype='bfloat16')", {}),
        ("engine(workspace_limit=250)", {}),  # other candidates
        ("engine()", {"FAKE_VERSION": "91901"}),
        ("engine()", {"FAKE_NAME": "Another GPU"}),
    ):
        found = run(f"report(engine={call}, counts=counts())", **kept, **environment)
        assert found["engine"][0] == "engine 12"
        assert found["counts"][0] > 0
        assert found["counts"][1:] == [0, 1], call


_EPILOGUES = """
every = [Epilogue(), Epilogue(relu=True), Epilogue(has_bias=True, relu=True)]
report(found=[engine(epilogue=epilogue) for epilogue in every], counts=counts(),
       size=jaxgrad.plan_cache_info()["cudnn"])
"""


def test_the_key_holds_the_epilogue(run, tmp_path):
    """In memory and on disk: the fastest engine that supports each epilogue."""
    kept = {"JAXGRAD_PLAN_CACHE_DIR": str(tmp_path), "FAKE_FUSED": "2"}
    for misses, hits in ((3, 0), (0, 3)):
        found = run(_EPILOGUES, "11:100:30,12:200:20,13:300:10", **kept)
        assert found["found"] == [["engine 13", 300], ["engine 12", 200], ["engine 12", 200]]
        assert found["counts"][1:] == [hits, misses]
        assert found["size"]["misses"] == 3


_ACTIVATION = """
bias = jax.ShapeDtypeStruct((4,), "float32")

def call(x, w, bias):
    return jaxgrad.conv_general_dilated(x, w, **SETTINGS, bias=bias, activation="relu", implementation=IMPLEMENTATION)

step = jax.grad(lambda *args: jnp.sum(jnp.sin(call(*args))), (0, 1, 2))
found = {}
for IMPLEMENTATION in ("cudnn", None):
    jax.clear_caches()
    text = jax.jit(step).trace(*arguments(), bias).lower(lowering_platforms=("cuda",)).as_text()
    (line,) = [line for line in text.splitlines() if "@jaxgrad_cudnn_conv_forward" in line]
    explanation = jaxgrad.explain(
        jaxgrad.conv_general_dilated, *arguments(), **SETTINGS, bias=bias, activation="relu", platform="gpu",
        implementation=IMPLEMENTATION,
    )
    (forward,) = [unit.reason for unit in explanation.passes if unit.name == "forward"]
    found[str(IMPLEMENTATION)] = [
        "relu = true" in line, "tensor<4xf32>" in line, text.count("stablehlo.maximum"),
        text.count("@jaxgrad_cudnn_conv_"), forward,
    ]
report(**found)
"""


def test_activation_fused_into_the_kernel(run):
    reason = "bias and relu are fused"
    expected = {"cudnn": f"forced by implementation='cudnn'; {reason}", "None": f"cuDNN; {reason}"}
    found = run(_ACTIVATION, FAKE_FUSED="2")
    assert found == {name: [True, True, 0, 3, text] for name, text in expected.items()}


@pytest.mark.parametrize(
    "environment", [{}, {"FAKE_FUSED": "2", "FAKE_REFUSES": "11:3000,12:3000"}], ids=["no engine", "no plan"]
)
def test_activation_without_a_fused_kernel(run, environment):
    """The convolution runs on cuDNN, and XLA computes bias and relu."""
    reason = "XLA applies relu: cuDNN has no fused kernel for this problem"
    expected = {"cudnn": f"forced by implementation='cudnn'; {reason}", "None": f"cuDNN; {reason}"}
    found = run(_ACTIVATION, **environment)
    assert found == {name: [False, False, 1, 3, text] for name, text in expected.items()}


def test_only_timed_choices_are_stored(run, tmp_path):
    script = """
found = [engine(search=search) for search in ("heuristic", "fallback")]
os.environ["FAKE_BLOCK"] = "1000"
report(found=found + [engine()], counts=counts())
"""
    found = run(script, JAXGRAD_PLAN_CACHE_DIR=str(tmp_path))
    # The first engine of the heuristic, with a workspace for one more; without memory for timing too, with the
    # workspace of the timed engines. The first engine was run once, to check it.
    assert found["found"] == [["engine 11", 200], None, ["engine 11", 300]]
    assert found["counts"] == [1, 0, 1]
    assert _files(tmp_path) == {}


_DAMAGES = {
    "empty": lambda text, other: b"",
    "cut off": lambda text, other: text[:-5],
    "one bit": lambda text, other: text[:-3] + bytes([text[-3] ^ 1]) + text[-2:],
    "another format": lambda text, other: text.replace(b"jaxgrad plan 1", b"jaxgrad plan 0"),
    "of another key": lambda text, other: other,
    "not text": lambda text, other: bytes(range(256)) * 99,
    "huge": lambda text, other: text + b" " * (2 << 20),
}


def test_a_damaged_file_is_ignored_and_rewritten(run, tmp_path):
    kept = {"JAXGRAD_PLAN_CACHE_DIR": str(tmp_path)}
    sizes = f"[{', '.join(str(8 + i) for i in range(len(_DAMAGES) + 1))}]"
    ask = f"report(found=[engine(size=size) for size in {sizes}], counts=counts())"
    run(ask, **kept)
    before = _files(tmp_path)
    names = sorted(before)
    for damage, name, other in zip(_DAMAGES.values(), names[1:], names[:-1], strict=True):
        (tmp_path / name).write_bytes(damage(before[name], before[other]))
        assert (tmp_path / name).read_bytes() != before[name]
    found = run(ask, **kept)
    assert found["counts"][1:] == [1, len(_DAMAGES)]
    assert all(name == "engine 12" for name, _ in found["found"])
    assert _files(tmp_path) == before


def test_an_invalid_choice_is_searched_again(run, tmp_path):
    """Absent from the list, or impossible to build: a new search replaces the stored choice."""
    kept = {"JAXGRAD_PLAN_CACHE_DIR": str(tmp_path)}
    ask = "report(engine=engine(), counts=counts())"
    run(ask, **kept)
    refused = run(ask, FAKE_REFUSES="12:3000", **kept)
    assert refused["engine"] == ["engine 13", 300]
    assert refused["counts"][0] > 0
    assert run(ask, **kept)["counts"][0] == 0
    gone = run(ask, ENGINES.replace("13:", "14:").replace("300:20", "300:99"), **kept)
    assert gone["engine"] == ["engine 12", 300]
    assert gone["counts"][0] > 0
    # The same engine with another knob is another choice.
    moved = run(ask, "11:100:30,13:300:20,12:200:10", **kept)
    assert moved["engine"] == ["engine 12", 300]
    assert moved["counts"][0] > 0
    assert len(_files(tmp_path)) == 1


def test_an_unwritable_directory(run, tmp_path):
    """One warning; the calls run without stored plans."""
    (tmp_path / "file").touch()
    script = """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    found = [engine(size=size) for size in (8, 9, 10)]
report(found=found, warned=[str(w.message) for w in caught if w.category is RuntimeWarning])
"""
    found = run(script, JAXGRAD_PLAN_CACHE_DIR=str(tmp_path / "file" / "directory"))
    assert found["found"] == [["engine 12", 300]] * 3
    (warned,) = found["warned"]
    assert str(tmp_path / "file" / "directory") in warned
    assert "Not a directory" in warned


def test_the_directory_holds_in_a_process_that_lowers_no_call(on_fake_cuda, tmp_path):
    """An exported program requests its plans when it runs."""
    script = f"""
import json, os, sys
import jaxgrad
from jaxgrad._src.native import cuda
sizes = dict(window_strides=[1, 1], padding=[2, 0, 2, 0], rhs_dilation=[1, 1], feature_group_count=1)
layouts = dict(lhs_spec=[0, 3, 1, 2], rhs_spec=[3, 2, 0, 1], out_spec=[0, 3, 1, 2])
shapes = (2, 8, 8, 4), (3, 3, 4, 4), (2, 8, 8, 4)
math = dict(has_bias=False, relu=False, allow_tf32=True, deterministic=False, search=1, workspace_limit=1000)
cuda.cudnn_unavailable()
cuda.module.conv_plan(0, 0, 0, shapes, sizes | layouts, **math)
print(json.dumps([os.listdir({str(tmp_path)!r}), "jaxgrad._src.conv.kernels.cudnn_plan" in sys.modules]))
"""
    files, lowers = on_fake_cuda(script, JAXGRAD_PLAN_CACHE_DIR=str(tmp_path))
    assert any(name.endswith(".plan") for name in files)
    assert not lowers


def test_update_sets_the_directory(run, tmp_path):
    script = f"""
config.update(plan_cache_dir={str(tmp_path / "one")!r})
engine()
config.update(plan_cache_dir=None)
engine(size=9)
report(kept=[name for name in os.listdir({str(tmp_path / "one")!r}) if name.endswith(".plan")])
"""
    assert len(run(script)["kept"]) == 1


def test_many_processes_at_once(run, tmp_path):
    kept = {"JAXGRAD_PLAN_CACHE_DIR": str(tmp_path)}
    ask = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool:
    report(found=list(pool.map(lambda size: engine(size=size), [*range(8, 40)] * 2)), counts=counts())
"""
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: run(ask, **kept), range(4)):
            assert found["found"] == [["engine 12", 300]] * 64
    files = _files(tmp_path)
    assert len(files) == 32
    assert all(name.endswith(".plan") for name in files)
    assert run(ask, **kept)["counts"] == [0, 32, 0]


def test_the_default_limit_is_a_share_of_the_memory(run):
    """A sixteenth of 12 GiB, in powers of two: 512 MiB."""
    engines = f"11:{(512 << 20) + 1}:10,12:{512 << 20}:20"
    ask = "report(found=engine(search='heuristic'), more=engine(search='heuristic', workspace_limit=1 << 30))"
    assert run(ask, engines) == {"found": ["engine 12", 512 << 20], "more": ["engine 11", (512 << 20) + 1]}
    engines = f"11:{(1 << 30) + 1}:10,12:{1 << 30}:20"
    assert run(ask, engines, FAKE_TOTAL=str(143 << 30))["found"] == ["engine 12", 1 << 30]


_FULL = """
def outcome(call):
    try:
        return call()
    except RuntimeError as error:
        return f"RuntimeError: {error}"

jax.default_backend = lambda: "gpu"  # the platform for which jaxgrad warns
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    typical = [lowered(size=size, implementation=None) for size in (8, 9)]
warned = [str(w.message) for w in caught if w.category is RuntimeWarning]
forced = outcome(lowered)
jax.process_count = lambda: 2
together = outcome(lambda: lowered(size=10, implementation=None))
jax.process_count = lambda: 1
for name in ("FAKE_FREE", "FAKE_CREATE", "FAKE_REFUSES"):
    os.environ.pop(name, None)
jax.clear_caches()
report(typical=typical, warned=warned, forced=forced, together=together,
       later=lowered(implementation=None), engine=engine())
"""


@pytest.mark.parametrize(
    ("environment", "error"),
    [({"FAKE_CREATE": "4000"}, "cudnnCreate"), ({"FAKE_REFUSES": "11:4000,12:4000,13:4000"}, "cudnnBackendFinalize")],
    ids=["no handle", "no plan"],
)
def test_a_full_device(run, environment, error):
    """cuDNN reports an internal error; the reason names the lack of memory. With memory, cuDNN is selected again."""
    found = run(_FULL, FAKE_FREE="1000", FAKE_BLOCK="1000", **environment)
    assert all("jaxgrad_cudnn_conv" not in text and "stablehlo.convolution" in text for text in found["typical"])
    (warned,) = found["warned"]
    for text in (warned, found["forced"], found["together"]):
        assert "the GPU's memory is full" in text
        assert "XLA_PYTHON_CLIENT_MEM_FRACTION" in text
        assert error in text
    assert "runs on XLA" in warned
    assert found["forced"].startswith("RuntimeError: jaxgrad.conv_general_dilated: implementation='cudnn' cannot run")
    assert found["together"].startswith("RuntimeError: ")
    assert "jaxgrad_cudnn_conv_forward" in found["later"]
    assert found["engine"][1] == 300


def test_a_full_device_does_not_change_the_program(run):
    """Another plan with another workspace would build. It is rejected, because other hosts use the first plan."""
    engines = "11:100:10,12:200:20"
    ask = """
try:
    report(found=engine(search="heuristic"))
except RuntimeError as error:
    report(found=str(error))
"""
    assert "memory is full" in run(ask, engines, FAKE_REFUSES="11:4000", FAKE_FREE="1000")["found"]
    # If the cause is not memory, every host has the same failure: the next plan is used.
    assert run(ask, engines, FAKE_REFUSES="11:4000")["found"] == ["engine 12", 200]
    assert run(ask, engines, FAKE_REFUSES="11:3000", FAKE_FREE="1000")["found"] == ["engine 12", 200]


def test_no_plan(run):
    assert run("report(found=engine())", "")["found"] is None
    assert run("report(found=engine())", FAKE_REFUSES="11:3000,12:3000,13:4001")["found"] is None


_TOO_OLD = """
jax.default_backend = lambda: "gpu"  # the platform for which jaxgrad warns
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    typical = [lowered(size=size, implementation=None) for size in (8, 9)]
try:
    forced = lowered()
except RuntimeError as error:
    forced = str(error)
report(typical=typical, warned=[str(w.message) for w in caught if w.category is RuntimeWarning], forced=forced)
"""


def test_too_old_cudnn(run):
    """Calls run on XLA, with one warning that names both versions; forced calls raise."""
    found = run(_TOO_OLD, FAKE_VERSION="90100")
    problem = "cuDNN 9.1.0 was found; jaxgrad needs 9.8.0 or a later release of major version 9"
    assert all("jaxgrad_cudnn_conv" not in text and "stablehlo.convolution" in text for text in found["typical"])
    (warned,) = found["warned"]
    assert warned.startswith(f"jaxgrad runs on XLA because the cuDNN kernels are missing: {problem}")
    assert f"implementation='cudnn' cannot run: the cuDNN kernels are missing: {problem}" in found["forced"]


_BY_PATH = """
import json, os
from jaxgrad import _cuda

def problem(paths):
    try:
        _cuda.load_cudnn(paths)
    except RuntimeError as error:
        return str(error)
    return ""

missing = problem(["/no/such/libcudnn.so.9"])
os.environ["FAKE_VERSION"] = "90100"
old = problem([os.environ["FAKE_PATH"]])
os.environ["FAKE_VERSION"] = "91900"
print(json.dumps([missing, old, problem([os.environ["FAKE_PATH"]]), _cuda.build_info()["cudnn"]]))
"""


def test_search_path_of_cudnn(run_python, fake_cuda):
    """By path if it is not found by name. After a failure no library stays loaded."""
    path = str(fake_cuda / "libcudnn.so.9")
    missing, *found = json.loads(run_python(_BY_PATH, FAKE_PATH=path, JAX_PLATFORMS="cpu").stdout)
    if not missing:
        pytest.skip("this system has a cuDNN of its own")
    assert missing.startswith("cuDNN cannot be opened: libcudnn.so.9: cannot open")
    assert "/no/such/libcudnn.so.9: cannot open" in missing
    assert found == ["cuDNN 9.1.0 was found; jaxgrad needs 9.8.0 or a later release of major version 9", "", "9.19.0"]
