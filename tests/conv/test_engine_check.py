"""Wrong engines of cuDNN are found before they are used, with the fakes of fake_cuda.c. No GPU is needed."""

from __future__ import annotations

import pytest
from cuda_module import ENGINES, NEEDS_CUDA_MODULE

pytestmark = NEEDS_CUDA_MODULE

KINDS = ("corner", "border", "channel", "nan", "factor", "unwritten")
_PRELUDE = """
import os
from fake_gpu import *

def counts():
    info = jaxgrad.plan_cache_info()["cudnn"]
    return [info[name] for name in ("checked", "rejected", "unchecked")]
"""


@pytest.fixture
def run(on_fake_cuda):
    """Runs a script in a process of its own and returns the values that it passes to `report`."""
    return lambda script, **environment: on_fake_cuda(_PRELUDE + script, **environment)


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_engine_is_not_used(run, kind):
    """By both searches; the program has the same workspace as with a right engine."""
    script = 'report(found=[engine(9, "exhaustive"), engine(10, "heuristic")], counts=counts())'
    right = run(script)
    assert right == {"found": [["engine 12", 300], ["engine 11", 200]], "counts": [4, 0, 0]}
    wrong = run(script, FAKE_WRONG=f"11:{kind},12:{kind}", FAKE_ENGINES=ENGINES + ",14:50:40")
    assert wrong["found"] == [["engine 13", 300], ["engine 14", 100]]
    assert wrong["counts"] == [6, 3, 0]  # 12 is not tried by the heuristic: it needs more than the reserved workspace
    assert run("report(found=engine(9), counts=counts())", FAKE_WRONG=f"11:{kind},12:{kind},13:{kind}") == {
        "found": None,
        "counts": [6, 6, 0],  # in two layouts
    }


def test_an_engine_whose_relu_loses_nan_is_not_used(run):
    """Without relu it is right."""
    script = """
prepare = cuda.cudnn_unavailable(), cuda.nvrtc_unavailable()
spec = (0, 2, 1)
geometry = ConvGeometry(spec, spec, spec, (1,), ((1, 0),), (1,), 1, (5,), (2,))
problem = ConvProblem(geometry, 2, 3, 4, jnp.dtype("float32"))
arguments = 0, 0, cuda.float_type(problem.dtype), problem.shapes, geometry.attributes()
report(found=[
    cuda.module.run_every_engine(*arguments, relu, relu, True, 1 << 30, lambda *_: True) for relu in (False, True)
])
"""
    without, with_relu = run(script, FAKE_FUSED="3", FAKE_WRONG="12:zero")["found"]
    assert [error < 1 for _, error, _ in without] == [True, True, True]
    assert [error < 1 for _, error, _ in with_relu] == [True, False, True]


@pytest.mark.parametrize(
    ("version", "environment", "expected", "rejected"),
    [
        ("91900", {}, "engine 13", 0),  # in this release it is known to be wrong
        ("92000", {}, "engine 1", 0),
        ("92000", {"FAKE_WRONG": "1:factor"}, "engine 13", 1),
        ("92000", {"FAKE_NVRTC": "6"}, "engine 13", 0),  # it cannot be checked
    ],
)
@pytest.mark.parametrize("search", ["exhaustive", "heuristic"])
def test_an_engine_that_was_wrong_is_used_in_a_later_release_if_it_is_right(
    run, search, version, environment, expected, rejected
):
    found = run(
        f"""
spec = (0, 3, 1, 2)
geometry = ConvGeometry(spec, (0, 3, 1, 2), spec, (1, 1), ((2, 0), (2, 0)), (1, 1), 1, (9, 8), (3, 3))
with jaxgrad.config.override(search={search!r}):
    problem = ConvProblem(geometry, 2, 4, 4, jnp.dtype("float32"))
    report(found=cudnn_plan("weight_gradient", problem, False, jaxgrad.config.current()).engine, counts=counts())
""",
        FAKE_VERSION=version,
        FAKE_ENGINES="1:100:10,13:300:20",
        **environment,
    )
    assert (found["found"], found["counts"][1]) == (expected, rejected)


def test_an_engine_that_overwrites_an_operand_does_not_make_the_next_ones_wrong(run):
    script = 'report(found=engine(9, "exhaustive"), counts=counts())'
    assert run(script, FAKE_WRONG="11:scribble") == {"found": ["engine 12", 300], "counts": [3, 0, 0]}


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_gradients_are_not_used(run, kind):
    """In every pass, whether plans are made before the program runs or while it does."""
    script = "report(found=[Step(planned=planned).run() for planned in (True, False)], counts=counts())"
    found = run(script, FAKE_WRONG=f"12:{kind}")
    assert found["found"] == ["right", "right"]
    assert found["counts"][1:] == [6, 0]  # three passes of two sizes


def test_the_check_is_what_rejects(run):
    """Without it, the same engine computes wrong gradients."""
    with pytest.raises(pytest.fail.Exception, match="Not equal to tolerance"):
        run("Step().run()", FAKE_WRONG="11:factor,12:factor,13:factor", FAKE_NVRTC="6")


def test_verdicts_are_remembered(run, tmp_path):
    """In the process and on disk, for the same cuDNN and GPU; a damaged file is ignored."""
    script = """
first = engine(9, "heuristic"), counts()
cudnn_plan.cache_clear()
jaxgrad.config.update(workspace_limit=1000)  # another plan of the same problem
report(first=first, again=[engine(9, "heuristic"), counts()])
"""
    kept = {"JAXGRAD_PLAN_CACHE_DIR": str(tmp_path)}
    expected = ["engine 12", 200]
    found = run(script, FAKE_WRONG="11:corner", **kept)
    assert found == {"first": [expected, [2, 1, 0]], "again": [expected, [2, 1, 0]]}
    (path,) = tmp_path.glob("*.checks")
    assert {path.suffix for path in tmp_path.iterdir()} == {".checks", ".cubin"}  # the kernel of the reference
    assert path.read_text().splitlines()[-1] == "eng11_k7=0:wrong eng12_k7=1:right"
    one = "report(found=engine(9, 'heuristic'), counts=counts())"
    assert run(one, **kept) == {"found": expected, "counts": [0, 0, 0]}  # engine 11 is right now, but not run again
    for changed in ({"FAKE_NAME": "Another GPU"}, {"FAKE_VERSION": "91901"}):
        assert run(one, **kept, **changed) == {"found": ["engine 11", 200], "counts": [1, 0, 0]}
    path.write_text(path.read_text().replace("wrong", "right"))
    assert run(one, FAKE_WRONG="11:corner", **kept) == {"found": expected, "counts": [2, 1, 0]}


@pytest.mark.thorough
def test_a_process_remembers_4096_verdicts_and_choices(run):
    """Those used last, without a directory. The plans of 1,024 calls are kept besides."""
    found = run("""
spec = (0, 2, 1)

def work(n):
    "The engines that are checked and the plans that run while the n-th of many small calls is planned."
    padding, batch, length = n // 1024, n // 32 % 32, n % 32
    geometry = ConvGeometry(spec, spec, spec, (1,), ((padding, 0),), (1,), 1, (2 + length,), (2,))
    problem = ConvProblem(geometry, 1 + batch, 1, 1, jnp.dtype("float32"))
    before = counts()[0], fake.fake_executions()
    cudnn_plan.cache_clear()
    cudnn_plan("forward", problem, True, jaxgrad.config.current())
    return [counts()[0] - before[0], fake.fake_executions() - before[1]]

first = work(0)
for n in range(1, 4096 + 8):
    work(n)
report(first=first, kept=work(100), evicted=work(1))
""")
    checked, executions = found["first"]
    assert checked == 3
    assert executions > checked  # the search times the plans, too
    assert found["kept"] == [0, 0]
    assert found["evicted"] == found["first"]


def test_a_stored_choice_is_checked(run, tmp_path):
    """A result of the search whose verdict is lost. A new search follows if the engine is wrong."""
    kept = {"JAXGRAD_PLAN_CACHE_DIR": str(tmp_path)}
    one = "report(found=engine(9), counts=counts())"
    assert run(one, **kept)["found"] == ["engine 12", 300]
    for path in tmp_path.glob("*.checks"):
        path.unlink()
    assert run(one, **kept) == {"found": ["engine 12", 300], "counts": [1, 0, 0]}
    for path in tmp_path.glob("*.checks"):
        path.unlink()
    assert run(one, FAKE_WRONG="12:nan", **kept) == {"found": ["engine 13", 300], "counts": [3, 1, 0]}


@pytest.mark.parametrize("environment", [{"FAKE_BLOCK": "1000"}, {"FAKE_NVRTC": "6"}], ids=["memory", "NVRTC"])
def test_without_memory_or_nvrtc_engines_are_unchecked(run, environment):
    """The program has the same workspace as one whose engines are checked."""
    script = 'report(found=engine(9, "heuristic"), counts=counts())'
    assert run(script, FAKE_WRONG="11:factor")["found"] == ["engine 12", 200]
    found = run(script, FAKE_WRONG="11:factor", **environment)
    assert found == {"found": ["engine 11", 200], "counts": [0, 0, 1]}


def test_engines_are_checked_once_nvrtc_is_loaded(run, fake_cuda, tmp_path):
    """A program that was lowered elsewhere finds no NVRTC under its plain name. That is not remembered."""
    for library in fake_cuda.iterdir():
        if "nvrtc" not in library.name:
            (tmp_path / library.name).symlink_to(library)
    script = f"""
step = Step(planned=False, gradients=False)
found = [step.run(), counts()]
from jaxgrad._src.native import cuda
cuda.library_paths = lambda packages, names: [{str(fake_cuda / "libnvrtc.so.13")!r}]
report(found=[*found, engine(9, "heuristic"), counts()])
"""
    found = run(script, LD_LIBRARY_PATH=str(tmp_path), FAKE_WRONG="11:factor")["found"]
    assert found[1] == [0, 0, 1]
    assert found[2:] == [["engine 12", 200], [2, 1, 1]]


def test_nothing_is_checked_while_a_stream_is_captured(run, tmp_path):
    """What is remembered counts."""
    script = """
step = Step(planned=False, gradients=False)
fake.fake_capture(1)
before = fake.fake_executions()
found = step.run()
report(found=found, runs=fake.fake_executions() - before, engine=fake.fake_engine(), counts=counts())
"""
    assert run(script) == {"found": "right", "runs": 1, "engine": 11, "counts": [0, 0, 1]}
    kept = {"JAXGRAD_PLAN_CACHE_DIR": str(tmp_path)}
    assert run("report(found=Step(gradients=False).run())", FAKE_WRONG="11:corner", **kept) == {"found": "right"}
    assert run(script, FAKE_WRONG="11:corner", **kept)["counts"][0] == 0


_RANDOM = """
found = []
for seed in range(12):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 4))
    groups, inputs, outputs, batch = (int(size) for size in rng.integers(1, 4, 4))
    window, strides, dilation = (tuple(int(size) for size in rng.integers(1, 4, n)) for _ in range(3))
    padding = tuple((int(low), int(high)) for low, high in rng.integers(0, 3, (n, 2)))
    spatial = tuple((k - 1) * d + int(rng.integers(1, 6)) for k, d in zip(window, dilation))
    specs = [tuple(int(axis) for axis in rng.permutation(n + 2)) for _ in range(3)]
    geometry = ConvGeometry(*specs, strides, padding, dilation, groups, spatial, window)
    for dtype in ("float32", "float64", "bfloat16", "float16"):
        problem = ConvProblem(geometry, batch, groups * inputs, groups * outputs, jnp.dtype(dtype))
        for conv_pass in range(3):
            for epilogue in ([(False, False), (True, True)] if conv_pass == 0 else [(False, False)]):
                found += cuda.module.run_every_engine(
                    0, conv_pass, cuda.float_type(problem.dtype), problem.shapes, geometry.attributes(), *epilogue,
                    True, 1 << 30, lambda engine, is_known_wrong: True,
                )
report(found=found)
"""


def test_right_engines_pass_and_wrong_ones_do_not(run):
    """Random lopsided problems of every pass, dtype, epilogue and layout. Right engines have small errors."""
    prepare = "cuda.cudnn_unavailable(), cuda.nvrtc_unavailable()\n"
    environment = {"FAKE_FUSED": "2", "FAKE_ENGINES": "11:0:1,12:0:1", "FAKE_WRONG": "12:corner", "JAX_ENABLE_X64": "1"}
    found = run(prepare + _RANDOM, **environment)["found"]
    assert len(found) == 12 * 4 * 4 * 2
    for tag, error, failure in found:
        assert failure == ""
        assert error < 0.7 if tag == "eng11_k7=0" else error > 1, (tag, error)
