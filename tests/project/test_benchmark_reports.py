"""The benchmarks' reports: contenders that fail, cases that are measured, tables and sections of pages."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import benchmarks_package  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks import (
    charts,
    compare,
    environment,
    gru,
    headline,
    recurrent,
    report,
    roofline,
    steps,
    tables,
    timing,
    wording,
)
from benchmarks.contender_names import (
    ACCELERATED,
    CUDNN_RNN,
    CUDNN_RNN_F16,
    LAX,
    OURS,
    OURS_ON_XLA,
    OURS_WITHOUT_RESETS,
    SCAN,
    TORCH_GRU,
    TORCH_GRU_GRAPH,
)
from benchmarks.options import Effort, Options
from jaxgrad._src.choice.environment import current_environment
from jaxgrad._src.native import cpu

_ENVIRONMENT = {"gpu": "NVIDIA H100", "platform": "gpu", "date": "2026-01-02", "versions": {"jax": "0.11"}}


@pytest.fixture(autouse=True)
def _small_rooflines(monkeypatch):
    """Large matrix products take most of the time of a quick measurement."""
    monkeypatch.setattr(roofline, "_SIZE", {"cpu": 64, "gpu": 64})
    monkeypatch.setattr(roofline, "_SUM_ELEMENTS", 1 << 10)
    monkeypatch.setattr(roofline, "_PRODUCTS", 1 << 10)
    monkeypatch.setattr(roofline, "_EFFORT", Effort(rounds=2, seconds=0))
    rates = roofline.matmul_gflops, roofline.memory_gbps, roofline.fma_gflops
    for rate in rates:
        rate.cache_clear()
    yield
    for rate in rates:
        rate.cache_clear()


def _gru_row(measure, times, **more):
    """A row in which jaxgrad takes 2 ms."""
    every = {OURS: 2.0, **times}
    return {
        "label": "5,4,3,2 bf16 lbr=1",
        "measure": measure,
        "dtype": "bfloat16",
        "flops": 1,
        "extra": False,
        "settings": {},
        "floor_ms": 0.5,
        "temporary_bytes": {OURS: 1_000_000, SCAN: 30_000_000},
        "times_ms": {name: {"median": time} for name, time in every.items()},
        "times_slower_than_jaxgrad": {name: time / 2 for name, time in times.items()},
        **more,
    }


def _report(rows, **more):
    return {"op": "gru", "environment": _ENVIRONMENT, "left_out": {}, "rows": rows, **more}


@pytest.mark.parametrize("failures", [1, 2])
def test_a_program_that_fails_on_a_thread_is_compiled_again(monkeypatch, failures):
    class Lowered:
        def __init__(self, failures):
            self.failures = failures

        def compile(self):
            self.failures -= 1
            if self.failures >= 0:
                raise RuntimeError("no memory")
            return "compiled"

    monkeypatch.setattr(timing.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(timing.jax, "device_count", lambda: 1)
    earlier = ValueError("not lowered")
    same, failed, pair = timing._compiled([earlier, Lowered(failures), [Lowered(0), None]])
    assert same is earlier
    assert failed == "compiled" if failures == 1 else isinstance(failed, RuntimeError)
    assert pair == ["compiled", None]


def test_versions_and_dates_of_some_rows():
    """README.md names those of the rows that it shows, not those of the whole file."""
    environments = [{**_ENVIRONMENT, "versions": {"jaxgrad": f"0.{i}"}, "date": f"2026-01-0{i}"} for i in (1, 2, 3)]
    rows = [_gru_row("forward", {SCAN: 3.0}, runs={OURS: 2, SCAN: 0}), _gru_row("backward", {}, runs={OURS: 1})]
    whole = {"op": "gru", "environment": environments[2], "environments": environments, "rows": rows}
    part, other = (report.of_rows(whole, [row]) for row in rows)
    assert (wording.versions(part), wording.dates(part)) == ("jaxgrad 0.1 and 0.3", "2026-01-01 to 2026-01-03")
    assert (wording.versions(other), wording.dates(other)) == ("jaxgrad 0.2", "2026-01-02")
    assert wording.versions(part, other) == "jaxgrad 0.1 to 0.3"
    of_one_run = {"op": "gru", "environment": environments[0], "rows": [_gru_row("forward", {})]}
    assert report.environments(report.of_rows(of_one_run, of_one_run["rows"])) == environments[:1]


def test_table_of_the_gru():
    forward = _gru_row(
        "forward",
        {SCAN: 6.0, OURS_ON_XLA: 5.0, TORCH_GRU: 8.0, TORCH_GRU_GRAPH: 4.0, CUDNN_RNN: 3.0, CUDNN_RNN_F16: 1.0},
        algorithms={CUDNN_RNN_F16: {"fastest": "PERSIST_STATIC_SMALL_H, packed, tensor cores, queued"}},
    )
    both = _gru_row(
        "forward+backward",
        {
            SCAN: 20.0,
            OURS_ON_XLA: 10.0,
            TORCH_GRU: 7.0,
            CUDNN_RNN: 3.0,
            CUDNN_RNN_F16: 4.0,
            OURS_WITHOUT_RESETS: 1.6,
        },
        algorithms={CUDNN_RNN: {"fastest": "STANDARD, packed, tensor cores, CUDA graph"}},
        kernel_us_a_step={"forward": 0.5, "backward": 0.75},
    )
    header, line = tables.lines(_report([forward, both], layout="gru"), [forward, both])
    assert dict(zip(header, line, strict=True)) == {
        "case": "5,4,3,2 bf16 lbr=1",
        "jaxgrad (ms)": "2.00 / 2.00",
        "lax.scan (ms, speed-up)": "6.00 / 20.0 (3.0x / 10x)",
        "jaxgrad on XLA (ms, speed-up)": "5.00 / 10.0 (2.5x / 5.0x)",
        "torch.nn.GRU (ms, speed-up)": "4.00 / 7.00 (2.0x / 3.5x)",
        "cuDNN (ms, speed-up)": "1.00 / 3.00 (0.50x / 1.50x, f16 small H / standard)",
        "cost of resets": "- / 25.0 %",
        "kernels, us a step": "0.500 / 0.750",
        "roofline (ms)": "0.500 / 0.500",
        f"temporary memory (MB): jaxgrad / {SCAN}": "1.00 / 30.0",
    }


def test_the_environment_names_the_instruction_set():
    described = environment.describe()
    assert described["cpu"].endswith(f", {cpu.build_info()['instruction_set']}")
    assert current_environment().platform != "cpu" or current_environment().device_kind.startswith(described["cpu"])


def test_facts_name_what_is_left_out():
    left_out = {f"{CUDNN_RNN}, of {case}, forward": "no memory" for case in "ab"}
    left_out |= {TORCH_GRU: "torch is not installed", f"{CUDNN_RNN}, of c, forward": "no algorithm"}
    *_, first, second, third = tables.facts(_report([_gru_row("forward", {})], left_out=left_out))
    assert first == f"Left out: {CUDNN_RNN}, of 2 rows (no memory)."
    assert second == f"Left out: {TORCH_GRU} (torch is not installed)."
    assert third == f"Left out: {CUDNN_RNN}, of c, forward (no algorithm)."


def test_a_contender_that_only_a_later_run_lacks_is_left_out_of_its_new_cases():
    earlier = _report([_gru_row("forward", {SCAN: 6.0, TORCH_GRU: 8.0})])
    new = [_gru_row(measure, {SCAN: 6.0}, label="another") for measure in ("forward", "forward+backward")]
    later = _report(
        [_gru_row("forward", {SCAN: 5.0}), *new],
        left_out={TORCH_GRU: "broken", CUDNN_RNN: "missing"},
    )
    assert report.joined(earlier, later)["left_out"] == {f"{TORCH_GRU}, of another": "broken", CUDNN_RNN: "missing"}


def test_a_contender_that_only_an_earlier_run_lacks_is_left_out_of_its_cases():
    cases = [_gru_row("forward", {SCAN: 6.0}, label=label) for label in ("again", "old")]
    earlier = _report(cases, left_out={TORCH_GRU: "broken", f"{CUDNN_RNN}, of again": "no memory"})
    later = _report([_gru_row("forward", {TORCH_GRU: 5.0, CUDNN_RNN: 4.0}, label="again")])
    assert report.joined(earlier, later)["left_out"] == {f"{TORCH_GRU}, of old": "broken"}


def test_the_runs_of_joined_reports_are_renumbered():
    first, second, third = ({**_ENVIRONMENT, "date": f"2026-01-0{day}"} for day in (1, 2, 3))
    row = partial(_gru_row, "forward", {SCAN: 6.0})
    earlier = _report([row(label="a")], environment=first)
    rows = [row(label="b", runs={OURS: 1, SCAN: 0}), row(label="c", runs={OURS: 2, SCAN: 2})]
    found = report.joined(earlier, _report(rows, environment=third, environments=[second, first, third]))
    days = [run["date"][-1] for run in report.environments(found)]
    assert {row["label"]: [days[row["runs"][name]] for name in (OURS, SCAN)] for row in found["rows"]} == {
        "a": ["1", "1"],
        "b": ["1", "2"],
        "c": ["3", "3"],
    }


def test_a_joined_report_of_one_run_has_its_environment():
    first, second = ({**_ENVIRONMENT, "date": f"2026-01-0{day}"} for day in (1, 2))
    rows = [_gru_row("forward", {SCAN: 6.0}, label=label) for label in "ab"]
    later = _report([{**rows[1], "runs": {OURS: 1, SCAN: 1}}], environment=second, environments=[second, first])
    assert report.joined(_report(rows[:1], environment=first), later) == _report(rows, environment=first)


def test_versions_of_several_runs():
    found = [{**_ENVIRONMENT, "versions": {"jaxgrad": f"0.2.0.dev{n}", "jax": "0.11.2"}} for n in (524, 93, 1000)]
    rows = [_gru_row("forward", {SCAN: 6.0})]
    assert wording.versions(_report(rows, environments=found[:2])) == "jaxgrad 0.2.0.dev93 and 0.2.0.dev524, jax 0.11.2"
    found[1]["versions"]["jaxgrad"] = "0.2.0"
    assert wording.versions(_report(rows, environments=found[:2])) == "jaxgrad 0.2.0.dev524 and 0.2.0, jax 0.11.2"
    found[1]["versions"]["jaxgrad"] = "0.2.0.dev93"
    assert wording.versions(_report(rows, environments=found)) == "jaxgrad 0.2.0.dev93 to 0.2.0.dev1000, jax 0.11.2"


def test_an_error_in_brief():
    assert wording.brief(ValueError("one\ntwo")) == "ValueError: one"
    assert wording.brief(ValueError("it raised:\nNo compiler\nmore")) == "ValueError: it raised: No compiler"
    assert wording.brief(ValueError()) == "ValueError"


def test_every_step_has_a_name_in_charts():
    cases = itertools.chain(*steps.CASES.values())
    assert {case.network for case in cases} <= set(charts._NETWORKS)


def test_a_section_of_a_part(tmp_path):
    rows = [_gru_row("forward", {SCAN: 6.0}, label=str(part), settings={"transposed": part}) for part in (False, True)]
    report.save(_report(rows), tmp_path)
    page = tmp_path / "docs" / "benchmarks" / "page.md"
    page.parent.mkdir(parents=True)
    chart = tmp_path / "docs" / "charts" / "gru-h100.png"
    chart.parent.mkdir()
    chart.touch()
    page.write_text("<!-- benchmark gru-h100 transposed: ## Transposed -->\n<!-- /benchmark -->\n")
    assert tables.update([page], tmp_path) == (["gru-h100"], [])
    assert "## Transposed\n\n![Transposed](../charts/gru-h100.png)\n\n| case |" in page.read_text()
    assert "| True |" in page.read_text()
    assert "| False |" not in page.read_text()


@pytest.mark.parametrize("has_chart", [False, True])
def test_a_section_with_a_heading(tmp_path, has_chart):
    page = tmp_path / "page.md"
    text = "before\n\n<!-- benchmark gru-h100: ### On an H100 -->\n<!-- /benchmark -->\n\nafter\n"
    page.write_text(text)
    assert tables.update([page], tmp_path) == ([], ["gru-h100"])
    assert page.read_text() == text
    report.save(_report([_gru_row("forward", {SCAN: 6.0})]), tmp_path)
    if has_chart:
        (tmp_path / "charts").mkdir()
        (tmp_path / "charts" / "gru-h100.png").touch()
    for _ in range(2):  # an update of an update changes nothing
        assert tables.update([page], tmp_path) == (["gru-h100"], [])
        start, table = page.read_text().split("| case |", 1)
        chart = "![On an H100](charts/gru-h100.png)\n\n" * has_chart
        assert start == f"before\n\n<!-- benchmark gru-h100: ### On an H100 -->\n\n### On an H100\n\n{chart}"
        assert table.endswith("\n\n<!-- /benchmark -->\n\nafter\n")


def test_contenders_that_fail_are_left_out(monkeypatch):
    def wrong(*arrays, **settings):
        return jax.tree.map(lambda y: 2 * y, gru_scan(*arrays, **settings))

    gru_scan = gru.scan_gru
    monkeypatch.setattr(gru, "scan_gru", wrong)
    found = gru.measure([gru.Case(5, 2, 3, 4)], Options(Effort(1, 0), frozenset({SCAN})))
    assert [set(row["times_ms"]) for row in found["rows"]] == [{OURS}] * 4
    left_out = {name: reason for name, reason in found["left_out"].items() if name.startswith(SCAN)}
    assert len(left_out) == 4
    assert all("differs from that of" in reason for reason in left_out.values())


def test_the_gru_without_resets_is_measured_beside_it():
    """Though its results differ, and only in cases with resets."""
    without, case = (gru.Case(50, 8, 3, 4, resets=resets) for resets in (False, True))
    found = gru.measure([case], Options(Effort(1, 0), frozenset({OURS_WITHOUT_RESETS})))
    assert [set(row["times_ms"]) for row in found["rows"]] == [{OURS, OURS_WITHOUT_RESETS}] * 4
    inputs, cotangents = gru.arrays(case)
    assert OURS_WITHOUT_RESETS not in {name for _, _, name in gru.functions(without, inputs, cotangents)}
    for (_, which, name), (function, args) in gru.functions(case, inputs, cotangents).items():
        if which == "forward" and name in (OURS, OURS_WITHOUT_RESETS):
            assert ("bool[50,8]" in str(jax.make_jaxpr(function)(*args))) == (name == OURS)  # the resets


def test_the_gru_and_its_roofline_have_the_precision_of_the_case(monkeypatch):
    programs = []
    in_program = gru.jax_in_program_contenders
    monkeypatch.setattr(gru, "jax_in_program_contenders", lambda of: programs.extend(of) or in_program(of))
    rates = {"default": 1e6, "highest": 1e3}
    for module in (compare, roofline):
        monkeypatch.setattr(module, "matmul_gflops", lambda dtype, precision: rates[precision])
    cases = [gru.Case(50, 20, 30, 40, highest=highest) for highest in (False, True)]
    tf32, highest = (gru.measure([case], Options(Effort(1, 0), frozenset()))["rows"][0] for case in cases)
    assert (tf32["matmul_gflops"], highest["matmul_gflops"]) == (1e6, 1e3)
    assert {program.precision for program in programs[: len(programs) // 2]} == {"default"}
    assert {program.precision for program in programs[len(programs) // 2 :]} == {"highest"}
    assert highest["floor_ms"] == round(tf32["flops"] / 1e9, 6)


@pytest.mark.parametrize(("dtype", "others"), [("float32", []), ("bfloat16", ["float32"])])
@pytest.mark.parametrize(
    ("precision", "by_default", "is_highest"),
    [("highest", "default", True), ("default", "highest", False), (None, "highest", True), (None, "default", False)],
)
def test_the_roofline_multiplies_in_the_precision(monkeypatch, dtype, others, precision, by_default, is_highest):
    """Or in JAX's default one."""
    programs = []

    def contenders(calls):
        programs.extend((call.args[0].dtype.name, str(jax.make_jaxpr(call.function)(*call.args))) for call in calls)
        return jax_contenders(calls)

    jax_contenders = roofline.jax_contenders
    monkeypatch.setattr(roofline, "jax_contenders", contenders)
    with jax.default_matmul_precision(by_default):
        roofline.matmul_gflops(dtype, precision)
    assert [of for of, _ in programs] == [each for each in (dtype, *others) for _ in range(3)]
    assert all(("HIGHEST" in program) == is_highest for _, program in programs)


def test_many_calls_in_a_program(monkeypatch):
    """The programs of a GPU, on the platform of the test."""
    monkeypatch.setattr(timing, "_IN_PROGRAM_SECONDS", 1e-4)
    monkeypatch.setattr(timing.jax, "default_backend", lambda: "gpu")

    def fails(x):
        raise ValueError("no such kernel")

    x = jnp.arange(4.0)
    programs = [
        timing.InProgram("works", lambda x: (x, 3 * x), (x,)),
        timing.InProgram("fails", fails, (x,)),
        timing.InProgram("without memory", lambda x: (x, 3 * x), (x,), with_memory=False),
    ]
    works, failed, without = timing.jax_in_program_contenders(programs)
    assert str(failed) == "no such kernel"
    assert (works.temporary_bytes is None, without.temporary_bytes) == (False, None)
    for contender in works, without:
        np.testing.assert_allclose(contender.outputs, [[0, 1, 2, 3], [0, 3, 6, 9]], atol=1e-20)
        assert contender.sample() > 0


def test_the_headline_has_accelerated_networks_and_losses():
    """Every row but that of the GRU, which is no convolution. Two speed-ups or more are below 1."""
    (header, *rows), _ = headline.lines(command._RESULTS)
    assert header[2] == "`jaxgrad.accelerate` (ms)"
    assert [row[0].startswith("GRU") for row in rows if not row[2]] == [True]
    assert sum("(0." in "".join(row) for row in rows) >= 2


def test_a_row_of_several_runs():
    """Each ratio is over the time of jaxgrad in the contender's run."""
    row = _gru_row("step", {ACCELERATED: 4.0, LAX: 30.0}, runs={OURS: 1, ACCELERATED: 0, LAX: 1}, label="a")
    row["times_slower_than_jaxgrad"] = {ACCELERATED: 1.25, LAX: 15.0}
    found = _report([row], op="steps")
    header, line = tables.lines(found, [row])
    cells = dict(zip(header, line, strict=True))
    assert cells["jax.lax, accelerated (ms)"] == "4.00†"
    assert cells["jax.lax (ms)"] == "30.0"
    assert cells["speed-up over JAX: jaxgrad / jax.lax, accelerated"] == "15x / 12x"
    assert any(fact.startswith("† Of another run") for fact in tables.facts(found))


def test_parts_of_a_report(tmp_path):
    """A table of some rows has the environments of their runs alone."""
    environments = [{**_ENVIRONMENT, "date": f"2026-01-0{day}"} for day in (1, 2)]
    rows = [
        _gru_row("training step", {}, label="step", runs={OURS: 0}),
        _gru_row("forward+backward", {}, label="call", runs={OURS: 1}),
    ]
    report.save(_report(rows, op="tuned", environments=environments), tmp_path)
    for part, label, date in (("steps", "step", "2026-01-01"), ("calls", "call", "2026-01-02")):
        text = tables._table(tmp_path, "tuned-h100", part)
        assert [line.split(" | ")[0] for line in text.splitlines()[2:3]] == [f"| {label}"]
        assert f"measured {date}." in text


def test_the_rest_of_the_cases(tmp_path, monkeypatch, capsys):
    def run(*options):
        monkeypatch.setattr(
            "sys.argv", ["benchmarks", "recurrent", "--repeats", "1", "--output", str(tmp_path), *options]
        )
        command.main()
        (path,) = tmp_path.glob("*.json")
        measured = capsys.readouterr().out.splitlines()
        return [row["label"] for row in json.loads(path.read_text())["rows"]], measured

    cases = [recurrent.parse_case(f"ppo,{steps},3,16") for steps in (9, 5)]
    monkeypatch.setattr(recurrent, "CASES", {jax.default_backend(): cases})
    first, last = (case.label for case in cases)
    rows, printed = run("--cases", "ppo,9,3,16")
    assert rows == printed[:1] == [first]
    rows, printed = run("--rest")
    assert rows == [first, last]
    assert first not in printed
    rows, printed = run("--rest")
    assert last not in printed


def test_matching_cases_and_parts_of_them(tmp_path, monkeypatch):
    measured = []
    cases = [recurrent.parse_case(f"ppo,{steps},3,16") for steps in (5, 6, 15, 16)]
    monkeypatch.setattr(recurrent, "CASES", {jax.default_backend(): cases})

    def run(*options):
        """The numbers of the cases that are measured, in their order."""
        measured.clear()
        monkeypatch.setattr("sys.argv", ["benchmarks", "recurrent", "--output", str(tmp_path), *options])
        command.main()
        return [cases.index(case) for case in measured]

    def one_row(these, options):
        measured.extend(these)
        return _report([{**_gru_row("step", {}), "label": case.label, "settings": vars(case)} for case in these])

    monkeypatch.setattr(recurrent, "measure", one_row)
    monkeypatch.setattr(report, "file_name", lambda *of: "gru-h100")
    assert run("--match", "[16],3", "6,3", "5,3") == [1, 3, 0, 2]
    (path,) = tmp_path.glob("*.json")
    path.unlink()
    assert run("--part", "1/2") == [0, 2]
    assert run("--rest", "--match", ",3", "15") == [1, 3]
    path.unlink()
    assert run("--cases", "ppo,5,3,16", "--add") == [0]
    assert run("--rest", "--part", "2/2") == [1, 3]
    assert len(json.loads(path.read_text())["rows"]) == 3
    for options in (["--part", "3/2"], ["--match", "("], ["--match", "nothing"]):
        with pytest.raises(SystemExit):
            run(*options)
    assert measured == []


def test_processes_add_to_one_report(tmp_path):
    """A lock belongs to the descriptor of a file: threads wait for each other as processes do."""

    def add(number):
        report.add(_report([{**_gru_row("forward", {}), "label": str(number)}]), tmp_path)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(add, range(40)))
    (path,) = tmp_path.iterdir()
    assert {row["label"] for row in report.load(path)["rows"]} == set(map(str, range(40)))
