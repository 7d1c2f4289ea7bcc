"""`python -m jaxgrad bench`: what it measures, prints and writes, and where it advises XLA."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxgrad
from jaxgrad import __main__ as program
from jaxgrad._src.bench import command, measure, shapes
from jaxgrad._src.bench.conv import ConvCall
from jaxgrad._src.bench.results import PassResult
from jaxgrad._src.tuning import timing

_CONV, _GRU = "2x7x6x8,3x3,16,groups=8", "5,4,3,8"
_PAGE = Path(__file__).parents[2] / "docs" / "bench.md"


@pytest.fixture(autouse=True)
def _few_samples(monkeypatch):
    monkeypatch.setattr(timing, "_ROUNDS", 3)
    monkeypatch.setattr(timing, "_SECONDS", 0)
    monkeypatch.setattr(measure, "_SECONDS", 0)
    monkeypatch.setattr(timing, "_SETTLE_SECONDS", 0)
    monkeypatch.setattr(timing, "_SAMPLE_SECONDS", {"cpu": 1e-9, "gpu": 1e-9})


@pytest.fixture
def bench(capsys):
    """Runs the command and returns what it prints, and what it writes to stderr."""

    def run(*arguments):
        assert program.main(["bench", *map(str, arguments)]) == 0
        return capsys.readouterr()

    return run


@pytest.fixture
def canned(monkeypatch):
    """Has the milliseconds of one pass after the other, by contender, in place of measurements."""

    def use(*passes):
        found, before = iter(passes), [None, None]

        def samples(programs, _):
            if programs is not before[0]:  # else the pass is measured once more
                before[:] = programs, next(found)
            return {name: [ms / 1e3 for ms in taken] for name, taken in before[1].items()}

        monkeypatch.setattr(measure, "samples_in_turns", samples)

    return use


def _steady(jaxgrad, xla):
    return {"jaxgrad": [jaxgrad] * 4, "XLA": [xla] * 4}


def test_every_op(bench, tmp_path):
    """The table, the file with every number, and the chart."""
    calls = {"--conv": _CONV, "--conv-transpose": "2x5x6x8,4x4,4,stride=2", "--batch-norm": "4x5x6", "--gru": _GRU}
    arguments = [word for pair in calls.items() for word in pair]
    files = {"json": tmp_path / "results.json", "chart": tmp_path / "chart.png"}
    out, err = bench(*arguments, "--no-torch", "--json", files["json"], "--chart", files["chart"], "--dtype", "f32")
    texts = [f"{option.removeprefix('--')} {value}" for option, value in calls.items()]
    assert [line.split(maxsplit=2)[2] for line in err.splitlines()] == [f"{i}/4 {t}" for i, t in enumerate(texts, 1)]
    rows = [line for line in out.splitlines() if re.match(r"\S+ \S+  +\d", line)]
    assert [" ".join(row.split()[:2]) for row in rows] == texts
    assert "PyTorch" not in out
    assert out.startswith(f"{jaxgrad._src.choice.environment.current_environment()}\n")
    assert "log scale" not in out  # the chart takes the place of the bars
    assert files["chart"].read_bytes().startswith(b"\x89PNG")
    written = json.loads(files["json"].read_text())
    assert written["environment"]["jax"] == jax.__version__
    assert [call["call"] for call in written["calls"]] == texts
    for call in written["calls"]:
        assert min(call["milliseconds"].values()) > 0
        assert call["speedup"]["XLA"] == call["milliseconds"]["XLA"] / call["milliseconds"]["jaxgrad"]
        for each in call["passes"].values():
            assert each["difference"] < 1e-4
            assert len(each["milliseconds"]["jaxgrad"]["samples"]) >= 3
    if jax.default_backend() == "cpu":
        conv, _, norm, _ = written["calls"]
        assert list(conv["passes"]) == ["forward", "input gradient", "weight gradient"]
        assert [p["explained"][0]["implementation"] for p in conv["passes"].values()] == ["onednn"] * 3
        assert [len(p["explained"]) for p in norm["passes"].values()] == [1, 2]


def test_where_xla_is_the_better_choice(bench, canned, tmp_path):
    """Not where it is faster by less than 5 %. Where jaxgrad runs on XLA and is slower, that is said too."""
    on_kernels = jax.default_backend() == "cpu"
    chart = tmp_path / "chart.svg"
    canned(_steady(1, 9.5), _steady(1, 0.96), _steady(2, 0.5), *[_steady(2, 1)] * 3)
    out, _ = bench("--conv", _CONV, "--conv", "1x4x4x1,3x3,1", "--no-torch", "--dtype", "f32", "--chart", chart)
    header, first, second = out.splitlines()[3:6]
    assert re.split(r"  +", header) == ["call", "jaxgrad (ms)", "XLA (ms)", "XLA / jaxgrad, by pass", "runs on"]
    by_pass = "forward 9.5x, input gradient 0.96x, weight gradient 0.25x"
    assert re.split(r"  +", first)[:4] == [f"conv {_CONV}", "4.00", "11.0 (2.7x)", by_pass]
    assert re.split(r"  +", second)[:3] == ["conv 1x4x4x1,3x3,1", "6.00", "3.00 (0.50x)"]
    assert "Geometric mean of the speed-ups: 1.17x over XLA (2 calls)." in out
    if on_kernels:
        advice = out.splitlines()[out.splitlines().index("XLA is the better choice for:") :]
        assert advice[1:] == [
            f"  conv {_CONV}, weight gradient: 0.500 ms on XLA, 2.00 ms on onednn",
            "jaxgrad.tune finds such passes in a program and runs them on XLA.",
            'implementation="xla" runs all passes of one call on XLA.',
            "jaxgrad left these passes to XLA, which took longer than in a program without jaxgrad:",
            *(
                f"  conv 1x4x4x1,3x3,1, {name}: 1.00 ms on XLA, 2.00 ms in jaxgrad"
                for name in ("forward", "input gradient", "weight gradient")
            ),
        ]
    drawn = chart.read_text()
    assert all(text in drawn for text in (f"conv {_CONV}", ">2.7x<", ">0.50x<", "over XLA"))


@pytest.mark.parametrize(("option", "value", "expected"), [("--conv", _CONV, 3), ("--gru", "64,2,3,4", 0)])
def test_short_calls_are_measured_as_repeated(bench, monkeypatch, option, value, expected):
    """Each pass, but not of a long GRU."""
    found = []
    monkeypatch.setattr(measure, "repeated_on_gpu", lambda programs: found.append(programs) or programs)
    bench(option, value, "--no-torch")
    assert [list(programs) for programs in found] == [["jaxgrad", "XLA"]] * expected


def test_chance_does_not_decide(bench, monkeypatch):
    """What XLA seems to be faster in is measured once more. These samples are no longer steady."""
    taken = []

    def samples(programs, _):
        taken.append(programs)
        return {"jaxgrad": [2e-3] * 4, "XLA": [1e-3 if len(taken) == 1 else 4e-3] * 4}

    monkeypatch.setattr(measure, "samples_in_turns", samples)
    out, _ = bench("--gru", _GRU, "--no-torch")
    assert "XLA is the better choice" not in out
    if jax.default_backend() == "cpu":
        assert len(taken) == 3
        assert "Warning: the times of 1 of 2 passes" in out


def test_bars_and_unsteady_times(bench, canned):
    unsteady = {"jaxgrad": [1, 1, 2, 2], "XLA": [1] * 4}
    canned(_steady(1, 0.96), _steady(1, 0.96), unsteady, *[_steady(1, 16)] * 2)
    out, _ = bench("--conv", _CONV, "--batch-norm", "4x5x6", "--no-torch")
    bars = [line for line in out.splitlines() if "|" in line]
    wide = {"jaxgrad": [1, 2, 2, 3], "XLA": [4, 4, 8, 8]}
    assert [PassResult((), samples).is_steady for samples in (unsteady, wide, _steady(2, 1))] == [False, True, True]
    assert [line.split(maxsplit=2)[2] for line in bars] == ["##| 0.83x", f"|{'#' * 38} 16x"]
    assert len({line.index("|") for line in bars}) == 1
    assert "\nWarning: the times of 1 of 5 passes vary by more than 25 %: too much for advice.\n" in out
    assert out.endswith("XLA is not more than 5 % faster than jaxgrad's kernels in any other pass.\n")


def test_a_contender_that_fails(bench, monkeypatch):
    def fails(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: too little memory\nmore")

    monkeypatch.setattr(ConvCall, "on_xla", fails)
    out, _ = bench("--conv", _CONV, "--no-torch")
    assert re.search(rf"^conv {_CONV}  [\d. ]+ failed ", out, re.M)
    assert re.search(
        rf"^XLA failed: conv {_CONV}, weight gradient: \w+: RESOURCE_EXHAUSTED: too little memory.$", out, re.M
    )
    assert "Geometric" not in out


_TOO_LARGE = "1000000x4096x4096x64,3x3,64"


def test_calls_that_fail_are_left_out(bench, monkeypatch):
    """Such as those that are too large for the memory. The others are measured, and printed."""

    def fails(self, *_):
        raise MemoryError("too large")

    monkeypatch.setattr(shapes.GruCall, "operands", fails)
    out, _ = bench("--gru", _GRU, "--conv", _CONV, "--no-torch")
    assert re.search(rf"^conv {_CONV}  +[\d.]+", out, re.M)
    assert f"gru {_GRU} was not measured: MemoryError: too large." in out


def test_no_call_is_measured(capsys, tmp_path):
    file = tmp_path / "results.json"
    assert program.main(["bench", "--conv", _TOO_LARGE, "--no-torch", "--json", str(file)]) == 1
    assert re.fullmatch(rf"conv {_TOO_LARGE} was not measured: \w*Error: .*\.\n", capsys.readouterr().out)
    assert not file.exists()


def test_results_that_differ(bench, monkeypatch):
    right = ConvCall.on_xla
    monkeypatch.setattr(ConvCall, "on_xla", lambda self, x, w: 2 * right(self, x, w))
    out, _ = bench("--conv", _CONV, "--no-torch", "--dtype", "bf16")
    assert f"the results of jaxgrad and XLA differ by 5e-01 of their norm: conv {_CONV}, forward." in out


def test_the_time_is_over(bench):
    """The first call is measured in any case."""
    out, _ = bench("--batch-norm", "4x5", "--batch-norm", "4x6", "--no-torch", "--seconds", "1e-9")
    assert re.search(r"^batch-norm 4x5  +[\d.]+", out, re.M)
    assert "batch-norm 4x6 was not measured: the 1e-09 seconds were over." in out


def test_without_pytorch(bench, canned, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "jaxgrad._src.bench.torch_calls", raising=False)
    canned(*[_steady(1, 2)] * 2)
    out, _ = bench("--batch-norm", "4x5")
    assert "PyTorch (ms)" not in out
    assert out.endswith("PyTorch was not measured: it is not installed.\n")


def test_without_matplotlib(bench, capsys, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda _: None)
    with pytest.raises(SystemExit, match="2"):
        bench("--chart", "chart.png")
    assert "argument --chart: requires matplotlib, which is not installed: pip inst" in capsys.readouterr().err


@pytest.fixture
def torch_calls(torch):
    """The module, whose settings of PyTorch are for one test."""
    modules = torch.backends.cudnn, torch.backends.cuda.matmul
    before = [module.allow_tf32 for module in modules]
    yield importlib.import_module("jaxgrad._src.bench.torch_calls")
    for module, value in zip(modules, before, strict=True):
        module.allow_tf32 = value


@pytest.mark.usefixtures("torch_calls")
def test_with_pytorch(bench, tmp_path):
    """Calls that PyTorch does not have are named."""
    file = tmp_path / "results.json"
    out, _ = bench("--gru", _GRU, "--gru", "3,4,3,8,linear_before_reset=false", "--json", file, "--dtype", "f32")
    first, second = json.loads(file.read_text())["calls"]
    assert first["milliseconds"]["PyTorch"] > 0
    assert second["milliseconds"]["PyTorch"] is None
    assert second["passes"]["forward"]["failed"] == {
        "PyTorch": "ValueError: PyTorch has no GRU with linear_before_reset=false"
    }
    assert re.search(r"Geometric mean of the speed-ups: .* over XLA \(2 calls\), .* over PyTorch \(1 call\)\.", out)


_CONVS = [
    "2x7x6x4,3x2,6,stride=2",
    "2x7x6x4,3,6,padding=1,dilation=2,groups=2,layout=NCHW",
    "2x9x4,3,6,padding=causal,dilation=2",
    "2x9x4,2,6,stride=2,padding=1,layout=NCW",
    "2x4x5x3x4,3x3x2,6,padding=VALID",
]
_TRANSPOSED = [
    "2x5x4x6,4,8,stride=2",
    "2x5x4x6,3x2,8,stride=2x3,groups=2",
    "2x5x6,3,8,stride=2,padding=1,layout=NCW",
    "2x5x4x3x6,2,8,stride=2,padding=VALID",
    "2x5x4x6,3,8,dilation=2,layout=NCHW",
]
_CALLS = [
    *(shapes.conv(f"{text},dtype=f32") for text in _CONVS),
    *(shapes.conv_transpose(f"{text},dtype=f32") for text in _TRANSPOSED),
    shapes.batch_norm("3x4x5x6,activation=relu,dtype=f32"),
    shapes.batch_norm("3x4x5,feature_axis=1,dtype=f32"),
    shapes.group_norm("3x6x5,groups=2,feature_axis=1,activation=silu,dtype=f32"),
    shapes.layer_norm("3x4x5,activation=gelu,dtype=f32"),
    shapes.rms_norm("3x4x5,dtype=f32"),
    shapes.gru("4,3,2,5,direction=bidirectional,dtype=f32"),
    shapes.gru("4,3,2,5,linear_before_reset=false,dtype=f32"),
]


@cache
def _operands(call):
    return timing.random_operands(call.operands(), call.deviations())[0]


@cache
def _on_xla(call):
    """The arrays of each pass."""
    return {each.name: _arrays(jax.jit(each.of(call.on_xla))(*_operands(call))) for each in call.passes}


def _arrays(tree):
    return [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("call", _CALLS, ids=lambda call: call.text)
def test_jaxgrad_and_xla_agree(call):
    for each in call.passes:
        found = _arrays(jax.jit(each.of(call.on_jaxgrad))(*_operands(call)))
        for ours, theirs in zip(found, _on_xla(call)[each.name], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("call", _CALLS[:-1], ids=lambda call: call.text)
def test_pytorch_agrees(call, torch_calls):
    """Values and input gradients, and for convolutions weight gradients, in PyTorch's layout."""
    tolerance = 1e-4 if jax.default_backend() == "cpu" else 1e-2  # TF32
    functions = torch_calls.functions(call, _operands(call))
    assert list(functions) == [each.name for each in call.passes]
    for name, arrays in _on_xla(call).items():
        found = functions[name]()
        if isinstance(call, ConvCall):
            found, expected = [found], [_in_pytorch(call, name, *arrays, torch_calls)]
        elif call.text.startswith("gru"):
            y = found[0] if name == "forward" else found[0][0]
            found = [y, *([found[1][0]] if name != "forward" else [])]
            T, D, B, H = arrays[0].shape
            expected = [arrays[0].swapaxes(1, 2).reshape(T, B, D * H), *([arrays[2]] if name != "forward" else [])]
        else:
            found = [found] if name == "forward" else [found[0], *found[1]]
            in_rows = call.kind in ("layer-norm", "rms-norm")  # PyTorch normalizes the last axis too
            expected = [a if in_rows or a.ndim == 1 else np.moveaxis(a, call.feature_axis, 1) for a in arrays]
        for theirs, ours in zip(found, expected, strict=True):
            np.testing.assert_allclose(theirs.detach().float().cpu().numpy(), ours, rtol=tolerance, atol=tolerance)


def _in_pytorch(call, name, array, torch_calls):
    if name != "weight gradient":
        return np.moveaxis(array, -1, 1) if call.channels_last else array
    array = np.moveaxis(array, (-1, -2), (0, 1)) if call.channels_last else array
    if not call.transposed:
        return array
    return torch_calls._transposed_weights(call, torch_calls.torch.tensor(array)).numpy()


def test_the_commands_of_the_page():
    """They parse, with the options that the command has."""
    commands = re.findall(r"^python -m jaxgrad bench(.*?)(?:#.*)?$", _PAGE.read_text().replace("\\\n", ""), re.M)
    assert len(commands) > 3
    parser = argparse.ArgumentParser()
    command.add_options(parser)
    for text in commands:
        if "--help" not in text:
            parser.parse_args(text.split())
