"""The tables of preferences in jaxgrad/_src/choice/tables, from measurements of the calls in preference_calls.py.

`--measure` measures every implementation of the cases' calls on the device at hand, as `jaxgrad.tune` does, and adds a
file to benchmarks/results/tunings. `--again` measures some calls anew, such as those of a changed kernel. The tables
are then written from these files and from shape_classes.json, which has the classes of calls in their order, with the
implementation to prefer where no case of a class was measured on any machine. `--check` only compares. At the end the
tables are replayed: how much longer the measured calls take than on their fastest implementations.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

import jaxgrad
from benchmarks.preference_calls import ON_XLA, all_calls, forms_to_measure, with_plan
from jaxgrad._src.choice.environment import Environment, current_environment
from jaxgrad._src.choice.measured_choices import Choice, RecordedCall
from jaxgrad._src.choice.op import lowering_platform, public_platform
from jaxgrad._src.choice.table import Row, first_row, read_table, typed_rows
from jaxgrad._src.conv.call.features import ConvFeatures
from jaxgrad._src.conv.call.params import ConvCall
from jaxgrad._src.conv.on_xla import forms as xla_forms
from jaxgrad._src.core.files import replace_file
from jaxgrad._src.gru.features import GruFeatures
from jaxgrad._src.gru.params import GruProblem
from jaxgrad._src.norm.cudnn import BatchNormFeatures, has_fast_kernels
from jaxgrad._src.tuning.choices import fastest, measured_choice
from jaxgrad._src.tuning.tuning import from_json

_HERE = Path(__file__).parent
TUNINGS = _HERE / "results" / "tunings"
TABLES = _HERE.parent / "jaxgrad" / "_src" / "choice" / "tables"
_CLASSES = _HERE / "shape_classes.json"
# Of a kernel over XLA, which can fuse neighboring operations and on a GPU calls cuDNN too: in the geometric mean of a
# class, in which its small calls count as much as the large ones, and in the sum of its times.
_MIN_GAIN = 1.03
_ENOUGH_CASES = 3  # a row that rests on fewer says so
_LIBRARIES = ("onednn", "xla", xla_forms.CONVOLUTION)  # others are compared with them, and oneDNN with XLA

_Class = Mapping[str, Any]
_Times = Mapping[str, Mapping[str, float]]  # by call and implementation
_Measured = Mapping[Environment, Mapping[str, Choice]]  # by machine and call
_Origins = Mapping[str, tuple[str, str]]  # by call, the day and the version of jaxgrad


def measure(platform: str, *, again: str | None = None, seconds: float = math.inf) -> Path:
    """Measures the calls of the cases of a platform on this device, without those that its file has already.

    The file is written after every call: a run that was stopped can be continued. Returns its path. What another jax,
    library or driver has measured is dropped, to be measured again. What another jaxgrad has measured is kept.

    Args:
      platform: "cpu" or "gpu".
      again: a regular expression. The calls whose text it matches come first, and are measured again where another
        jaxgrad measured them.
      seconds: no other call is started after them.
    """
    machine, start = current_environment(), time.monotonic()
    path = TUNINGS / (re.sub(r"[^\w -]", "", machine.device_kind) + ".json")
    old = _saved(path) if path.exists() else {}
    kept = {each: dict(choices) for each, choices in old.items() if _jaxgrad_apart(each) == _jaxgrad_apart(machine)}
    new = kept.setdefault(machine, {})
    left = _left(all_calls(platform), kept, machine, again)
    for index, text in enumerate(left, 1):
        if time.monotonic() - start > seconds:
            print(f"not measured in {seconds:g} s: {len(left) - index + 1} calls")
            break
        print(f"{index}/{len(left)} {text}", flush=True)
        if choice := _choice(text, platform):
            for choices in kept.values():
                choices.pop(text, None)
            new[text] = choice
            jaxgrad.Tuning({each: choices for each, choices in kept.items() if choices}).save(path)
        jax.clear_caches()  # the memory of compiled programs
    return path


def _saved(path: Path) -> Mapping[Environment, Mapping[str, Choice]]:
    """The measurements in a file. `Tuning.load` refuses the forms on XLA, which are no implementations."""
    return from_json(path.read_text()).machines


def _choice(text: str, platform: str) -> Choice | None:
    if text.endswith(ON_XLA):
        return fastest(forms_to_measure(all_calls(platform)[text]), xla_forms.CONVOLUTION)
    return measured_choice(with_plan(text, platform), lowering_platform(platform))


def _left(texts: Collection[str], kept: _Measured, machine: Environment, again: str | None) -> list[str]:
    """The calls to measure, those of `again` first."""
    anew = {text for text in texts if again is not None and re.search(again, text)}
    known = set(kept[machine]).union(*(set(choices) - anew for choices in kept.values()))
    return [text for text in sorted(texts, key=lambda text: text not in anew) if text not in known]


def _jaxgrad_apart(machine: Environment) -> Environment:
    """To compare all but the version of jaxgrad, which changes with every commit."""
    return dataclasses.replace(machine, jaxgrad="")


def write(folder: Path, *, check: bool) -> list[str]:
    """Writes the tables, or only compares them. Returns the names of those that differ from the files in the folder."""
    changed = []
    for name, table in tables().items():
        text, path = _as_text(table), folder / f"{name}.json"
        if not path.exists() or path.read_text() != text:
            changed.append(name)
            if not check:
                replace_file(path, text)
    return changed


def tables() -> dict[str, dict[str, Any]]:
    """The tables by name."""
    classes = json.loads(_CLASSES.read_text())
    found: dict[str, dict[str, Any]] = {}
    for platform in ("cpu", "gpu"):
        own = [each for each in classes if each["platform"] == platform]
        of_devices: dict[str, list[list[dict[str, Any]]]] = {}  # the rows of each machine, by its device
        measured_on = []
        for path in sorted(TUNINGS.glob("*.json")):
            times, origins, device = {}, {}, ""
            # A file may have measurements of several versions of jaxgrad, each of other calls.
            for machine, choices in _saved(path).items():
                if machine.platform == lowering_platform(platform):
                    own_times = {text: choice.times_us for text, choice in choices.items()}
                    count = sum(text in own_times for text in all_calls(platform))
                    measured_on.append(f"{count} of {len(all_calls(platform))} calls on {machine}")
                    times |= own_times
                    origins |= {text: (choice.date, machine.jaxgrad) for text, choice in choices.items()}
                    device = _device(machine)
            if times:
                forms = [each for each in own if each["op"] == xla_forms.OP]
                times = _in_preferred_forms(
                    typed_rows(_rows(forms, platform, times, origins), path.stem), platform, times
                )
                of_devices.setdefault(device, []).append(_rows(own, platform, times, origins))
        rows = _common(own, list(itertools.chain(*of_devices.values())), [each["unmeasured"] for each in own])
        for device, of_machines in of_devices.items():
            for row, different in zip(rows, _common(own, of_machines, [row["prefer"] for row in rows]), strict=True):
                if device and different["prefer"] != row["prefer"]:
                    on = {name: different[name] for name in ("prefer", "why", "measured")}
                    row["on"] = {**row.get("on", {}), device: on}
        found[platform] = {"measured_on": measured_on, "rows": rows}
    return found


def _device(machine: Environment) -> str:
    """The device whose own preferences a machine has measured; empty for a CPU without AVX-512, which has none."""
    if machine.platform == "cuda":
        return machine.device_kind
    return "avx512" if "avx512" in machine.device_kind else ""


def _in_preferred_forms(table: Sequence[Row], platform: str, times: _Times) -> _Times:
    """The times with those of XLA in the form that a table prefers, where the forms of a call were measured.

    The time of the call itself may be from before the table preferred this form.
    """
    of_calls = {}
    for text, recorded in all_calls(platform).items():
        call = text.removesuffix(ON_XLA)
        if call != text and text in times and "xla" in times.get(call, ()):
            form = _preferred(table, xla_forms.OP, recorded, platform, times[text].keys())
            of_calls[call] = {**times[call], "xla": times[text][form]}
    return {**times, **of_calls}


def _preferred(table: Sequence[Row], op: str, recorded: RecordedCall, platform: str, names: Collection[str]) -> str:
    """The implementation, or form on XLA, among `names` that a table prefers, as jaxgrad selects it."""
    found = partial(first_row, table, op, recorded.pass_name, _features(recorded, platform), names)
    row = found()
    assert row is not None
    if isinstance(recorded.call, ConvCall) and recorded.call.problem.num_problems:
        resized = found(resized=True)
        if op == xla_forms.OP:
            return (resized or row).prefer if row.prefer == xla_forms.CONVOLUTION else row.prefer
        return row.prefer if resized is None or row.prefer == "xla" else resized.prefer
    return row.prefer


class _Features(ConvFeatures):
    """The features on a device that has jaxgrad's kernel for transposes."""

    transposes_weights = True


def _features(recorded: RecordedCall, platform: str) -> Any:
    call: Any = recorded.call
    if isinstance(call, ConvCall):
        return _Features(
            call.problem, lowering_platform(platform), relu=call.fused_relu and recorded.pass_name == "forward"
        )
    if isinstance(call, GruProblem):
        return GruFeatures.of(call)
    return BatchNormFeatures(call.outer * call.inner, call.channels, has_fast_kernels(call))


def _rows(classes: Sequence[_Class], platform: str, times: _Times, origins: _Origins) -> list[dict[str, Any]]:
    """The rows of a table, one for each class. A call belongs to the first class that matches it and whose preferred
    implementation supports it."""
    rows = []
    left = {text: recorded for text, recorded in all_calls(platform).items() if text in times}
    for each in classes:
        row = Row(each["name"], each["op"], tuple(each["passes"]), each["when"], "", "", None, "")
        members = {
            text: times[text]
            for text, recorded in left.items()
            if _op(text, recorded) == row.op
            and recorded.pass_name in row.passes
            and row.matches(_features(recorded, platform))
        }
        measured = _measured(members, list(each["why"]), origins) if len(each["why"]) > 1 else None
        rows.append(_row(each, *(measured or (each["unmeasured"], None))))
        prefer = rows[-1]["prefer"]
        left = {text: recorded for text, recorded in left.items() if text not in members or prefer not in times[text]}
    return rows


def _op(text: str, recorded: RecordedCall) -> str:
    if text.endswith(ON_XLA):
        return xla_forms.OP
    kinds = {ConvCall: "conv", GruProblem: "gru"}
    return next((name for kind, name in kinds.items() if isinstance(recorded.call, kind)), "batch_norm")


def _row(each: _Class, prefer: str, measured: dict[str, Any] | None) -> dict[str, Any]:
    own = {name: each[name] for name in ("name", "op", "passes", "when")}
    return {**own, "prefer": prefer, "why": each["why"][prefer], "measured": measured}


def _measured(members: _Times, implementations: Sequence[str], origins: _Origins) -> tuple[str, dict[str, Any]] | None:
    """The implementation to prefer for some calls, and the measurement; None if there is none."""
    kernel, other = _kernel_and_other(implementations)
    pairs = {text: (us[other], us[kernel]) for text, us in members.items() if kernel in us and other in us}
    if not pairs:
        return None
    ratios = {text: theirs / own for text, (theirs, own) in pairs.items()}
    of_other, of_kernel = map(sum, zip(*pairs.values(), strict=True))
    if min(_geometric_mean(ratios.values()), of_other / of_kernel) < _MIN_GAIN:
        prefer, over, ratios = other, kernel, {text: 1 / ratio for text, ratio in ratios.items()}
    else:
        prefer, over = kernel, other
    date, version = max((origins[text] for text in ratios), key=lambda origin: (origin[0], _numbers(origin[1])))
    in_order = sorted(ratios, key=lambda text: ratios[text])
    return prefer, {
        "over": over,
        "ratio": round(_geometric_mean(ratios.values()), 3),
        "least": round(ratios[in_order[0]], 3),
        "cases": len(ratios),
        **({"few_cases": True} if len(ratios) < _ENOUGH_CASES else {}),
        "case": in_order[len(in_order) // 2],
        "date": date,
        "jaxgrad": version,
    }


def _kernel_and_other(implementations: Iterable[str]) -> list[str]:
    """The two implementations of a class, with the one that must be clearly faster as the first."""
    return sorted(implementations, key=lambda name: _LIBRARIES.index(name) if name in _LIBRARIES else -1)


def _numbers(version: str) -> list[int]:
    """To compare versions: 0.2.0.dev1000 is later than 0.2.0.dev875."""
    return list(map(int, re.findall(r"\d+", version)))


def _geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def _common(
    classes: Sequence[_Class], of_machines: Sequence[Sequence[dict[str, Any]]], unmeasured: Sequence[str]
) -> list[dict[str, Any]]:
    """The rows of several machines: a kernel is preferred where it is on all of them that measured the class.

    `unmeasured` are the preferences where none of them did.
    """

    common = []
    for each, prefer, *rows in zip(classes, unmeasured, *of_machines, strict=True):
        measured = [row for row in rows if row["measured"]]
        kernel, *_ = _kernel_and_other(each["why"])
        least = min(
            measured,
            key=lambda row, kernel=kernel: row["measured"]["ratio"] * (1 if row["prefer"] == kernel else -1),
            default={"prefer": prefer, "measured": None},
        )
        common.append(_row(each, least["prefer"], least["measured"]))
    return common


def regrets(platform: str, table: Sequence[Row], times: _Times) -> dict[str, float]:
    """By call of an op that the table has, the time of the preferred implementation over that of the fastest."""
    found = {}
    ops = {row.op for row in table}
    for text, recorded in all_calls(platform).items():
        if (us := times.get(text)) is not None and (op := _op(text, recorded)) in ops:
            found[text] = us[_preferred(table, op, recorded, platform, us.keys())] / min(us.values())
    return found


def replays() -> dict[str, dict[str, float]]:
    """The `regrets` of each device that was measured, with the table that it takes."""
    found = {}
    for path in sorted(TUNINGS.glob("*.json")):
        machines = _saved(path)
        machine = next(iter(machines))
        platform = public_platform(machine.platform)
        table = read_table(platform, _device(machine))
        times: dict[str, Mapping[str, float]] = {}
        for choices in machines.values():
            times |= {text: choice.times_us for text, choice in choices.items()}
        found[path.stem] = regrets(platform, table, _in_preferred_forms(table, platform, times))
    return found


def _as_text(table: dict[str, Any]) -> str:
    """JSON with a line for each row."""
    head = json.dumps({**table, "rows": []}, indent=1).removesuffix("[]\n}")
    return head + "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in table["rows"]) + "\n ]\n}\n"
