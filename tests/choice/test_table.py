"""The tables of preferences: they are complete and up to date, and a call takes the row for its device."""

from __future__ import annotations

import dataclasses
import json
import re
from functools import partial

import benchmarks_package  # noqa: F401
import jax
import numpy as np
import pytest

import jaxgrad
from benchmarks import preference_calls, preferences, report
from jaxgrad._src.choice import table
from jaxgrad._src.choice.environment import Environment
from jaxgrad._src.choice.measured_choices import Choice, Recorder
from jaxgrad._src.conv.call.features import ConvFeatures
from jaxgrad._src.conv.kernels.cudnn import CudnnBackend
from jaxgrad._src.gru.features import GruFeatures
from jaxgrad._src.native import cpu, cuda
from jaxgrad._src.norm.cudnn import BatchNormFeatures

_BOTH = ("forward", "backward")
_OF_CONV = ("forward", "input_gradient", "weight_gradient")
PASSES = {"conv": _OF_CONV, "conv_on_xla": _OF_CONV, "batch_norm": _BOTH, "gru": _BOTH}
_NHWC = ("NHWC", "HWIO", "NHWC")


def _features(op):
    """The features that a class may be made of."""
    if not op.startswith("conv"):
        return set({"batch_norm": BatchNormFeatures, "gru": GruFeatures}[op]._fields)
    (recorded,) = _recorded((2, 8, 7, 3), (3, 2, 3, 4)).values()
    return {name for name in dir(ConvFeatures(recorded.call.problem, "cuda")) if not name.startswith("_")}


def _recorded(x, w, window_strides=(1, 1), groups=1):
    recorder = Recorder()
    arrays = (jax.ShapeDtypeStruct(shape, "float32") for shape in (x, w))
    settings = {"dimension_numbers": _NHWC, "feature_group_count": groups}
    op = partial(jaxgrad.conv_general_dilated, window_strides=window_strides, padding="SAME", **settings)
    with jaxgrad.config.override(tuning=recorder):
        jax.jit(op).lower(*arrays)
    return recorder.calls


@pytest.mark.parametrize(
    ("name", "device"),
    [("cpu", ""), ("cpu", "avx512"), ("gpu", ""), ("gpu", "NVIDIA H200"), ("gpu", "NVIDIA H100 80GB HBM3")],
)
def test_a_table_is_complete(name, device):
    rows = table.read_table(name, device)
    assert any(row.device == device for row in rows)
    for op in {row.op for row in rows}:
        features = _features(op)
        for pass_name in PASSES[op]:
            own = [row for row in rows if row.op == op and pass_name in row.passes]
            assert own[-1].when == {}, "no row for every call"
            for row in own:
                assert set(row.when) <= features, row
                assert row.why
    assert name == "cpu" or {row.op for row in rows} == set(PASSES)


def test_the_tables_are_up_to_date():
    """They are those that the measurements in benchmarks/results give."""
    assert preferences.write(preferences.TABLES, check=True) == []


WITHOUT_MEASUREMENT = {
    "gpu": {
        # Hopper has the features last in memory here, which an earlier row takes.
        ("conv", "depthwise with a large window, float32", ("weight_gradient",)),
        ("conv", "depthwise with dilation, float32", ("weight_gradient",)),
        # Transposed convolutions have strides.
        ("conv", "reversed, three spatial axes", ("input_gradient",)),
        ("conv", "reversed, asymmetric padding", ("input_gradient",)),
        ("conv", "reversed", ("input_gradient",)),
        # A measurement includes the gradients, which a rollout does not compute.
        ("gru", "one step", _BOTH),
        # Many large problems, and large ones with strides.
        ("conv_on_xla", "other independent problems on XLA", ("weight_gradient",)),
        # There is no other form.
        ("conv_on_xla", "other, on XLA", _OF_CONV),
    },
    "cpu": {("gru", "one step", _BOTH), ("conv_on_xla", "other, on XLA", _OF_CONV)},
}


@pytest.mark.parametrize("name", WITHOUT_MEASUREMENT)
def test_a_class_without_a_measurement_has_a_reason(name):
    """Each other class has a case in benchmarks/preference_calls.py."""
    rows = table.read_table(name)
    assert {(row.op, row.name, row.passes) for row in rows if row.measured is None} == WITHOUT_MEASUREMENT[name]


def test_the_tables_prefer_implementations_that_are_nearly_the_fastest():
    replays = preferences.replays()
    assert set(replays) == {path.stem for path in preferences.TUNINGS.glob("*.json")}
    for device, found in replays.items():
        slow = [text for text, regret in found.items() if regret > 1.2]
        assert len(found) > 100, device
        assert np.log(list(found.values())).mean() < np.log(1.04), device
        assert len(slow) < 0.09 * len(found), (device, slow)
        assert max(found.values()) < 3, device


_DATES = {"A100": "2026-11-20", "B200": "2026-11-26"}


def _machine(kind):
    return Environment("cuda", kind, "0.11.2", "0.11.2", "0.1.0", "cuDNN 9.19.0", "580.1")


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Writes measurements: by kind of GPU, how much faster cuDNN is for calls with a stride, and for others."""
    monkeypatch.setattr(preferences, "TUNINGS", tmp_path)
    calls = preference_calls.calls("gpu")

    def write(**gains):
        for kind, (strided, other) in gains.items():
            choices = {}
            for text in calls:
                gain = strided if "window_strides" in text else other
                choices[text] = Choice("xla", "xla", {"xla": 10.0 * gain, "cudnn": 10.0}, _DATES[kind])
            jaxgrad.Tuning({_machine(kind): choices}).save(tmp_path / f"{kind}.json")
        return preferences.tables()

    return write


def _prefers(rows, name, device=""):
    (row,) = [row for row in rows if row["name"] == name and row["passes"] == ["weight_gradient"]]
    row = row.get("on", {}).get(device, row)
    return row["prefer"], row["measured"] and row["measured"]["over"]


def test_rows_follow_the_measurements(measured):
    found = measured(A100=(2.0, 0.5), B200=(1.02, 1.3))
    assert set(found) == {"cpu", "gpu"}
    rows = found["gpu"]["rows"]
    assert _prefers(rows, "strides", "A100") == ("cudnn", "xla")
    assert _prefers(rows, "dilation", "A100") == ("xla", "cudnn")
    assert _prefers(rows, "strides", "B200") == ("xla", "cudnn")  # 1.02: not clearly faster
    assert _prefers(rows, "dilation", "B200") == ("cudnn", "xla")
    assert _prefers(rows, "strides") == ("xla", "cudnn")  # not on all of them
    assert _prefers(rows, "dilation") == ("xla", "cudnn")
    (row,) = [row for row in rows if row["name"] == "dilation" and row["prefer"] == "xla"]
    assert set(row["on"]) == {"B200"}  # the A100 has the common preference
    assert row["measured"]["ratio"] == 2.0
    assert row["measured"]["cases"] > 5
    assert row["measured"]["case"] in preferences.all_calls("gpu")
    dates = {(device, one["measured"]["date"]) for each in rows for device, one in each.get("on", {}).items()}
    assert dates == set(_DATES.items())
    on_a100, on_b200 = found["gpu"]["measured_on"]
    assert on_a100.endswith(f" calls on {_machine('A100')}")
    assert on_b200.endswith(f" calls on {_machine('B200')}")


def test_rows_with_few_cases_say_so(measured):
    found = [row["measured"] for row in measured(A100=(2.0, 0.5))["gpu"]["rows"] if row["measured"]]
    assert {each["cases"] <= 2 for each in found} == {True, False}
    assert all(("few_cases" in each) == (each["cases"] <= 2) for each in found)


def test_what_a_table_costs(measured):
    rows = table.typed_rows(measured(A100=(2.0, 0.5))["gpu"]["rows"], "gpu")
    own = {text: "cuda" if text.startswith("gru ") else "cudnn" for text in preference_calls.calls("gpu")}
    times = {text: {"xla": 1.0, name: 3.0} for text, name in own.items()}
    regrets = preferences.regrets("gpu", rows, times)
    assert len(regrets) == len(times)
    assert set(regrets.values()) == {1.0, 3.0}


def _row(op, when, prefer):
    return table.Row("a class", op, _OF_CONV, when, prefer, "a reason", None, "gpu")


def _call_of_problems():
    """The text and the description of a weight gradient of independent problems."""
    calls = preference_calls.calls("gpu").items()
    return next((text, recorded) for text, recorded in calls if text.startswith("conv") and "problems=" in text)


@pytest.mark.parametrize("form", ["taps", "convolution"])
def test_the_time_of_xla_is_that_of_the_form_that_it_runs(form):
    """The call itself may have been measured in another form."""
    text, _ = _call_of_problems()
    times = {text: {"xla": 9.0, "cudnn": 2.0}, text + " on XLA": {"taps": 3.0, "convolution": 5.0}}
    rows = [_row("conv_on_xla", {"problems": {"at_least": 1}}, form), _row("conv_on_xla", {}, "convolution")]
    found = preferences._in_preferred_forms(rows, "gpu", times)
    assert found == {**times, text: {"xla": times[text + " on XLA"][form], "cudnn": 2.0}}
    without = {text: times[text]}
    assert preferences._in_preferred_forms(rows, "gpu", without) == without


@pytest.mark.parametrize(
    ("of_one", "of_problems", "expected"),
    [("cudnn", "cudnn", "cudnn"), ("cudnn", "xla", "xla"), ("xla", "cudnn", "xla"), ("xla", "xla", "xla")],
)
def test_what_a_table_prefers_for_independent_problems(of_one, of_problems, expected):
    """`vmap` takes a kernel away that was selected for one problem, and adds none."""
    _, recorded = _call_of_problems()
    rows = [_row("conv", {"problems": {"at_least": 1}}, of_problems), _row("conv", {}, of_one)]
    rows.append(_row("conv", {}, "xla"))
    assert preferences._preferred(rows, "conv", recorded, "gpu", {"cudnn", "xla"}) == expected


def test_a_device_takes_its_own_preferences(tmp_path, monkeypatch, measured):
    """Each call looks up again, in one process too."""
    for name, content in measured(A100=(0.5, 2.0), B200=(0.5, 0.5)).items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    monkeypatch.setattr(table, "_TABLES", tmp_path)
    table.read_table.cache_clear()
    jax.clear_caches()  # rows of other tables
    recorded = next(iter(_recorded((64, 56, 56, 64), (3, 3, 64, 64)).values()))
    features = ConvFeatures(recorded.call.problem, "cuda")
    try:
        for kind, of, prefer, over in (
            ("A100", "'gpu' for 'A100'", "cudnn", "xla"),
            ("B200", "'gpu'", "xla", "cudnn"),
            ("C300", "'gpu'", "xla", "cudnn"),
            (None, "'gpu'", "xla", "cudnn"),
        ):
            monkeypatch.setattr(cuda, "device_kind", lambda kind=kind: kind)
            row = table.preference("conv", "forward", "cuda", features, ("cudnn", "xla"))
            assert (row.table, row.prefer) == ("gpu", prefer)
            measured = rf"measured \d\.\d\dx as fast as {over} in \d+ cases, the last on [\d-]+ with jaxgrad 0.1.0"
            assert re.fullmatch(rf"row 'other' of the table {of}, {measured}", str(row))
            assert str(CudnnBackend().row("forward", recorded.call)) == str(row)  # which is kept by the device
    finally:
        table.read_table.cache_clear()
        jax.clear_caches()  # rows of these tables


def _row_with(activation, dtype, window, groups=1):
    """The row that the forward pass of a convolution with a bias takes on a GPU, with or without a GPU."""
    x = jax.ShapeDtypeStruct((64, 56, 56, 64), dtype)
    w = jax.ShapeDtypeStruct((window, window, 64 // groups, 64), dtype)
    bias = jax.ShapeDtypeStruct((64,), dtype)
    settings = {"dimension_numbers": _NHWC, "feature_group_count": groups, "activation": activation}
    op = partial(jaxgrad.conv_general_dilated, window_strides=(1, 1), padding="SAME", **settings)
    recorder = Recorder()
    with jaxgrad.config.override(tuning=recorder):
        jax.jit(op).trace(x, w, bias=bias).lower(lowering_platforms=("cuda",))
    (recorded,) = recorder.calls.values()
    row = table.preference("conv", "forward", "cuda", preferences._features(recorded, "gpu"), ("cudnn", "xla"))
    assert str(CudnnBackend().row("forward", recorded.call)) == str(row)
    return row


@pytest.mark.parametrize(("dtype", "window"), [("bfloat16", 3), ("float32", 3), ("bfloat16", 1)])
def test_rows_for_relu_are_for_calls_with_relu_alone(dtype, window):
    """A kernel of cuDNN may apply relu: such calls have rows of their own, which no other call takes."""
    assert "relu" in _row_with("relu", dtype, window).when
    assert "relu" not in _row_with(None, dtype, window).when


def test_1x1_windows_with_groups_have_other_rows():
    """The kernels of cuDNN for groups are slow."""
    assert _row_with("relu", "bfloat16", 1).prefer == "cudnn"
    for groups in (8, 64):
        row = _row_with("relu", "bfloat16", 1, groups)
        assert "1x1 windows, 16 bits" not in row.name
        assert row.prefer == "xla"


@pytest.mark.parametrize(
    ("window", "stride", "features", "groups", "decides"),
    [
        (16, 16, 6, 2, True),
        (8, 8, 14, 2, True),
        (8, 8, 16, 2, False),
        (7, 7, 6, 2, False),
        (16, 8, 6, 2, False),
        (16, 16, 6, 1, False),
        (16, 16, 6, 6, True),
    ],
)
def test_large_patches_in_groups_of_few_features_are_a_matrix_product(window, stride, features, groups, decides):
    """cuDNN pads the features of a group."""
    calls = _recorded((4, 224, 224, features), (window, window, features // groups, 48), (stride, stride), groups)
    features = ConvFeatures(next(iter(calls.values())).call.problem, "cuda")
    row = table.preference("conv", "weight_gradient", "cuda", features, ("cudnn", "xla"))
    assert (row.name == "few features of a group, large windows that do not overlap") == decides, row
    assert not decides or row.prefer == "xla"


def _older(machine):
    return dataclasses.replace(machine, jaxgrad="0.0.9")


@pytest.mark.parametrize(
    ("again", "expected"),
    [
        (None, {"new": {"first", "third", "fourth"}, "older": {"second"}}),
        ("second|first", {"new": {"first", "second", "third", "fourth"}}),
    ],
)
def test_a_measurement_goes_on_where_it_ended(tmp_path, monkeypatch, again, expected):
    """What another jaxgrad measured is kept, unless it is measured again. Another driver's times are dropped."""
    machine = _machine("A100")
    names = {machine: "new", _older(machine): "older"}
    monkeypatch.setattr(preferences, "TUNINGS", tmp_path)
    monkeypatch.setattr(preferences, "current_environment", lambda: machine)
    texts = ("first", "second", "third", "fourth")
    monkeypatch.setattr(preferences, "all_calls", lambda platform: texts)
    monkeypatch.setattr(preferences, "with_plan", lambda text, platform: text)
    choice = Choice("xla", "xla", {"xla": 1.0})
    old = {
        dataclasses.replace(machine, driver="another"): {"third": choice},
        _older(machine): {"second": choice},
        machine: {"first": choice},
    }
    jaxgrad.Tuning(old).save(tmp_path / "A100.json")
    asked = []
    monkeypatch.setattr(preferences, "measured_choice", lambda text, platform: asked.append(text) or choice)
    found = jaxgrad.Tuning.load(preferences.measure("gpu", again=again)).machines
    assert asked == (["second", "third", "fourth"] if again else ["third", "fourth"])
    assert {names[each]: set(choices) for each, choices in found.items()} == expected


def test_a_measurement_has_a_time_limit(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(preferences, "TUNINGS", tmp_path)
    monkeypatch.setattr(preferences, "all_calls", lambda platform: ("first", "second"))
    monkeypatch.setattr(preferences, "measured_choice", lambda *call: pytest.fail("was measured"))
    preferences.measure("cpu", seconds=-1)
    assert capsys.readouterr().out == "not measured in -1 s: 2 calls\n"


def test_a_table_joins_the_measurements_of_several_versions(measured, tmp_path):
    """Each version of jaxgrad has measured other calls."""
    rows = measured(A100=(2.0, 0.5))["gpu"]["rows"]
    path = tmp_path / "A100.json"
    (choices,) = jaxgrad.Tuning.load(path).machines.values()
    half = dict(list(choices.items())[::2])
    rest = {text: choice for text, choice in choices.items() if text not in half}
    jaxgrad.Tuning({_machine("A100"): half, _older(_machine("A100")): rest}).save(path)
    found = preferences.tables()["gpu"]
    assert [_of_any_version(row) for row in found["rows"]] == [_of_any_version(row) for row in rows]
    versions = {row["measured"]["jaxgrad"] for row in found["rows"] if row["measured"]}
    assert versions == {_machine("A100").jaxgrad, _older(_machine("A100")).jaxgrad}
    total = len(preferences.all_calls("gpu"))
    machines = {_machine("A100"): half, _older(_machine("A100")): rest}
    assert found["measured_on"] == [f"{len(those)} of {total} calls on {on}" for on, those in machines.items()]


def test_versions_are_compared_by_their_numbers():
    assert preferences._numbers("0.2.0.dev1000") > preferences._numbers("0.2.0.dev875")


def _of_any_version(row):
    return {**row, "measured": row["measured"] and {**row["measured"], "jaxgrad": ""}}


def test_a_row_says_where_the_other_one_is_faster_but_not_clearly():
    measured = {"over": "cudnn", "ratio": 0.952, "least": 0.9, "cases": 7, "date": "2026-11-20", "jaxgrad": "0.3.1"}
    row = table.Row("other", "conv", ("forward",), {}, "xla", "a reason", measured, "gpu")
    where = "in 7 cases, the last on 2026-11-20 with jaxgrad 0.3.1"
    assert str(row) == f"row 'other' of the table 'gpu': cudnn was measured 1.05x as fast {where}: too little"
    row = dataclasses.replace(row, measured={**measured, "ratio": 1.25})
    assert str(row).endswith(f"measured 1.25x as fast as cudnn {where}")
    row = dataclasses.replace(row, measured={**row.measured, "cases": 1, "few_cases": True})
    assert "as cudnn in only 1 case, the last" in str(row)


def test_reports_of_different_devices_have_different_names():
    names = [
        report.file_name("conv", gpu) for gpu in (None, "NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe")
    ]
    assert names == ["conv-cpu", "conv-h200", "conv-h100-80gb-hbm3", "conv-h100-pcie"]


def test_an_implementation_that_is_not_there_is_passed_over():
    (recorded,) = _recorded((2, 8, 7, 3), (3, 2, 3, 4)).values()
    (depthwise,) = [
        row
        for row in table.read_table("gpu")
        if row.when == {"depthwise": True, "channels_last": True} and row.passes == ("weight_gradient",)
    ]
    features = _Changed(ConvFeatures(recorded.call.problem, "cuda"), depthwise=True, grouped=True)
    first = table.preference("conv", "weight_gradient", "cuda", features, ("cuda", "cudnn", "xla"))
    assert first == depthwise
    assert first.prefer == "cuda"
    second = table.preference("conv", "weight_gradient", "cuda", features, ("cudnn", "xla"))
    assert second.prefer != "cuda"


class _Changed:
    """Features with other values."""

    def __init__(self, features, **changes):
        self.features = features
        vars(self).update(changes)

    def __getattr__(self, name):
        return getattr(self.features, name)


@pytest.mark.parametrize(("low", "high", "matches"), [(1, 3, True), (3, 3, True), (4, None, False), (None, 2, False)])
def test_bounds(low, high, matches):
    bounds = {"at_least": low, "at_most": high}
    condition = {name: value for name, value in bounds.items() if value is not None}
    row = table.Row("three", "batch_norm", ("forward",), {"rows": condition}, "xla", "", None, "")
    assert row.matches(BatchNormFeatures(3, 1, True)) is matches


@pytest.mark.parametrize(
    ("instruction_set", "processes", "own"),
    [
        ("avx512", 1, True),
        ("avx512", 2, False),  # the second process may run without AVX-512
        ("avx2", 1, False),
        ("baseline", 1, False),
    ],
)
def test_cpus_take_the_preferences_of_their_instruction_set(monkeypatch, instruction_set, processes, own):
    monkeypatch.setattr(table, "_instruction_set", lambda: instruction_set)
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    assert table.this_device("cpu") == (instruction_set if processes == 1 else "")
    assert {row.device for row in table.rows("cpu")} == ({"", "avx512"} if own else {""})


def test_the_instruction_set_is_that_of_the_kernels():
    assert table._instruction_set() == cpu.build_info()["instruction_set"]
    assert cpu.build_info()["instruction_set"] in ("avx512", "avx2", "baseline")


@pytest.fixture
def measured_cpus(tmp_path, monkeypatch):
    """Writes measurements: by kind of CPU, how much faster oneDNN is than XLA, and which calls were measured."""
    monkeypatch.setattr(preferences, "TUNINGS", tmp_path)

    def write(gains, left_out="nothing"):
        for kind, gain in gains.items():
            choices = {
                text: Choice("xla", "xla", {"xla": 10.0 * gain, "cpu": 10.0, "onednn": 10.0}, "2026-11-26")
                for text in preference_calls.calls("cpu")
                if "avx512" not in kind or left_out not in text
            }
            machine = dataclasses.replace(_machine(f"{kind}, 2 cores"), platform="cpu")
            jaxgrad.Tuning({machine: choices}).save(tmp_path / f"{kind}.json")
        return preferences.tables()

    return write


def _rows_of_groups(table_of_cpus):
    """The common preference and that of CPUs with AVX-512, with their ratios; None for the latter if it is the same."""
    (row,) = [row for row in table_of_cpus["rows"] if row["name"] == "groups" and row["op"] == "conv"]
    return [each and (each["prefer"], each["measured"]["ratio"]) for each in (row, row.get("on", {}).get("avx512"))]


def test_rows_of_cpus_follow_the_machines_with_their_instruction_set(measured_cpus):
    """The common preference follows all of them."""
    found = measured_cpus({"One, avx512": 2.0, "Another, avx512": 1.5, "Old, avx2": 0.5})
    assert set(found) == {"cpu", "gpu"}
    assert _rows_of_groups(found["cpu"]) == [("xla", 2.0), ("onednn", 1.5)]
    assert len(found["cpu"]["measured_on"]) == 3


def test_a_class_that_was_measured_elsewhere_alone_takes_the_common_preference(measured_cpus):
    found = measured_cpus({"One, avx512": 2.0, "Old, avx2": 0.5}, left_out="feature_group_count")
    assert _rows_of_groups(found["cpu"]) == [("xla", 2.0), None]


def test_explain_names_the_row():
    x, w = np.ones((2, 8, 9, 16), np.float32), np.ones((3, 3, 16, 16), np.float32)
    call = jaxgrad.conv_general_dilated, x, w, (1, 1), "SAME"
    explained = jaxgrad.explain(*call, dimension_numbers=_NHWC, platform="cpu")
    assert explained.preference.startswith("row 'other' of the table 'cpu', ")
    assert str(explained).endswith(f"; {explained.preference})")
    w = np.ones((3, 3, 1, 16), np.float32)
    of_passes = jaxgrad.explain(
        call[0], x, w, *call[3:], dimension_numbers=_NHWC, feature_group_count=16, platform="cpu"
    ).passes
    assert len({each.preference for each in of_passes}) == 3  # the passes have different rows
    forced = jaxgrad.explain(*call, dimension_numbers=_NHWC, platform="cpu", implementation="onednn")
    assert forced.preference == ""
