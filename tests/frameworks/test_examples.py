"""The scripts in examples/ with models of flax and equinox: each trains without and with `jaxgrad.accelerate`."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

_EXAMPLES = Path(__file__).parents[2] / "examples"
# What a model must reach in one epoch: the pattern of the number, and its range. Chance is 10 % of the digits; the
# error is 0.3 without denoising, and 0.37 for the mean digit.
_LEARNS = {
    "accelerate_nnx": (r"test accuracy: ([\d.]+)% of 360 digits", (60, 100)),
    "accelerate_linen": (r"test error: ([\d.]+) ", (0.05, 0.22)),
    "accelerate_equinox": (r"test error: ([\d.]+) ", (0.05, 0.32)),
}
_FORBIDDEN = re.compile(r"jaxgrad|conv_general_dilated")


def _number(pattern: str, text: str) -> float:
    match = re.search(pattern, text)
    assert match, f"{pattern!r} is not in:\n{text}"
    return float(match[1])


def test_every_script_is_tested():
    assert {path.stem for path in _EXAMPLES.glob("accelerate_*.py")} == set(_LEARNS)


@pytest.mark.parametrize("name", _LEARNS)
def test_example(run_example, monkeypatch, name):
    monkeypatch.setattr(importlib.import_module("comparing"), "STEPS", 3)
    text = run_example(name, "--epochs", "1", "--batch-size", "32")
    pattern, (low, high) = _LEARNS[name]
    assert low < _number(pattern, text) <= high
    assert _number(r"time per step without jaxgrad.accelerate: ([\d.]+) ms", text) > 0
    assert _number(r"time per step with jaxgrad.accelerate: ([\d.]+) ms", text) > 0
    assert _number(r"the losses of the first 3 steps differ by at most (\S+) of their value", text) < 1e-3
    assert re.search(r"^\S+\.py:\d+ .*  conv  .*weight_gradient.*  onednn  ", text, re.M), text
    assert _number(r"([\d.]+) % of the arithmetic \(", text) > 50
    assert "not accelerated" not in text
    assert Path(f"{name}.png").stat().st_size > 5_000


@pytest.mark.parametrize("name", _LEARNS)
def test_models_do_not_mention_jaxgrad(name):
    """The section of the model and its training step."""
    (model,) = re.findall(r"# --- the model.*?# --- training", (_EXAMPLES / f"{name}.py").read_text(), re.DOTALL)
    assert len(model.splitlines()) > 20
    assert not _FORBIDDEN.search(model)


@pytest.mark.parametrize("name", _LEARNS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-size", "2000"], "argument --batch-size: must be at most the 1437 digits, got 2000"),
        (["--implementation", "cpu"], "unrecognized arguments: --implementation cpu"),
    ],
)
def test_invalid_arguments(run_example, capsys, name, arguments, message):
    with pytest.raises(SystemExit) as caught:
        run_example(name, *arguments)
    assert message in f"{caught.value.code} {capsys.readouterr().err}"
