"""The training scripts in examples/ on the ops: each runs, learns, saves its plot, and rejects invalid arguments."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jaxgrad._src.core import op as op_module

_EXAMPLES = Path(__file__).parents[2] / "examples"
_SHORT = {
    "train_digits_cnn": ["--epochs", "3", "--batch-size", "32"],
    "train_digits_gru": ["--epochs", "3", "--hidden", "64"],
    "train_data_parallel": ["--epochs", "3", "--batch-size", "32"],
    "train_digits_vae": ["--epochs", "2"],
}
_EVERY_SCRIPT = pytest.mark.parametrize("name", _SHORT)


def _number(pattern: str, text: str) -> float:
    match = re.search(pattern, text)
    assert match, f"{pattern!r} is not in:\n{text}"
    return float(match[1])


def test_every_script_is_tested():
    assert {path.stem for path in _EXAMPLES.glob("train_*.py")} == set(_SHORT)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("train_digits_cnn", ["--model", "plain"]),
        pytest.param("train_digits_cnn", ["--model", "resnext"], marks=pytest.mark.thorough),
        pytest.param("train_digits_cnn", ["--model", "mobilenet"], marks=pytest.mark.thorough),
        ("train_digits_gru", ["--direction", "bidirectional"]),
        ("train_data_parallel", []),
    ],
)
def test_a_classifier_learns(run_example, name, more):
    """Chance is 10 %. The evaluation uses the running statistics; wrong statistics reduce the accuracy."""
    text = run_example(name, *_SHORT[name], *more)
    assert _number(r"test accuracy: ([\d.]+)% of 360 digits", text) > 80
    assert _number(r"time per step: ([\d.]+) ms", text) > 0
    assert Path(f"{name}.png").stat().st_size > 10_000
    for op in ["gru"] if "gru" in name else ["conv_general_dilated", "batch_norm_training", "batch_norm_inference"]:
        assert f"{op} on " in text


def test_the_autoencoder_learns(run_example):
    """An untrained autoencoder, with logits near zero, reaches about -1000 nats."""
    name = "train_digits_vae"
    text = run_example(name, *_SHORT[name])
    assert -200 < _number(r"test ELBO: (-[\d.]+) nats", text) < -80
    assert Path(f"{name}.png").stat().st_size > 10_000
    assert "conv_transpose on " in text


@_EVERY_SCRIPT
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epochs", "0"], "argument --epochs: must be a positive integer, got 0"),
        (["--epochs", "many"], "argument --epochs: must be a positive integer, got many"),
        (["--batch-size", "2000"], "argument --batch-size: must be at most the 1437 digits, got 2000"),
        (["--learning-rate", "nan"], "argument --learning-rate: must be a positive number, got nan"),
        (["--seed", "-1"], "argument --seed: must be an integer in [0, 2**32), got -1"),
        (["--plot", "nowhere/plot.png"], "argument --plot: must be a .png file in a folder that exists"),
        (["--plot", "plot.pdf"], "argument --plot: must be a .png file in a folder that exists"),
        (["--implementation", "gpu"], "argument --implementation: invalid choice: 'gpu'"),
    ],
)
def test_invalid_arguments(run_example, capsys, name, arguments, message):
    with pytest.raises(SystemExit) as caught:
        run_example(name, *arguments)
    assert caught.value.code not in (0, None)
    assert message in f"{caught.value.code} {capsys.readouterr().err}"


@_EVERY_SCRIPT
def test_missing_implementation(run_example, monkeypatch, name):
    for op in op_module.OPS.values():
        for backend in op.backends:
            monkeypatch.setattr(backend, "unavailable", lambda: "the module is not there")
    with pytest.raises(SystemExit, match=r"argument --implementation: .*the module is not there"):
        run_example(name, "--implementation", "cpu")
