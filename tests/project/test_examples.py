"""The training scripts in examples/: each runs, learns, saves its plot, and rejects invalid arguments.

tests/frameworks/test_examples.py has the scripts accelerate_*.py.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

_EXAMPLES = Path(__file__).parents[2] / "examples"
_SHORT = {
    "train_digits_cnn": ["--epochs", "3", "--batch-size", "32"],
    "train_digits_gru": ["--epochs", "3", "--hidden", "64"],
    "train_data_parallel": ["--epochs", "3", "--batch-size", "32"],
    "train_digits_vae": ["--epochs", "2"],
}
# Scripts on training.py, which also measure the step without jaxgrad. Each must print two numbers: its own, and the
# baseline. The quotient of the two must lie in the range.
_COMPARED = {
    "segment_images": (
        ["--steps", "120", "--batch-size", "2", "--learning-rate", "4e-3"],
        r"test intersection over union: ([\d.]+), by Otsu's threshold ([\d.]+)",
        (1.1, 1.4),
    ),
    "generate_digits": (
        ["--steps", "100"],
        r"Frechet distance to the test digits: ([\d.]+), before training ([\d.]+), of the training digits 0.1",
        (0.01, 0.6),
    ),
    "model_signal": (["--steps", "15"], r"test bits per sample: ([\d.]+), by linear prediction ([\d.]+)", (0.5, 0.92)),
}
# Of test_recurrent_examples.py.
_OF_OTHER_TESTS = {"train_char_gru", "train_recurrent_ppo", "train_private", "fine_tune_torch_gru"}
_EVERY_SCRIPT = pytest.mark.parametrize("name", _SHORT)


def _number(pattern: str, text: str) -> float:
    match = re.search(pattern, text)
    assert match, f"{pattern!r} is not in:\n{text}"
    return float(match[1])


def test_every_script_is_tested():
    scripts = {path.stem for path in _EXAMPLES.glob("*.py") if "def main(" in path.read_text()}
    assert {name for name in scripts if not name.startswith("accelerate_")} == {
        *_SHORT,
        *_COMPARED,
        *_OF_OTHER_TESTS,
    }


@pytest.mark.parametrize(
    ("name", "more"),
    [
        pytest.param("train_digits_cnn", [], marks=pytest.mark.thorough),  # the README's first command, in .ci/run
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


@pytest.mark.parametrize("name", _COMPARED)
def test_a_script_beats_its_baseline(run_example, monkeypatch, name):
    training = importlib.import_module("training")
    monkeypatch.setattr(training, "SECONDS", 0)
    arguments, pattern, (low, high) = _COMPARED[name]
    text = run_example(name, *arguments)
    match = re.search(pattern, text)
    assert match, f"{pattern!r} is not in:\n{text}"
    assert low < float(match[1]) / float(match[2]) < high
    without, with_jaxgrad = (
        _number(rf"time per step {word} jaxgrad: ([\d.]+) ms", text) for word in ("without", "with")
    )
    assert _number(r"speed-up: ([\d.]+)x", text) == pytest.approx(without / with_jaxgrad, rel=0.02)
    assert Path(f"{name}.png").stat().st_size > 20_000


def test_step_times(run_example, monkeypatch):
    """The steps are called in turns. The first call of each compiles it, and is not counted."""
    training, calls, now = importlib.import_module("training"), [], [0.0]
    monkeypatch.setattr(training, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(training, "SECONDS", 14)

    def step_of(seconds):
        def step(state):
            def callback():
                calls.append(seconds)
                now[0] += seconds

            now[0] += 100  # compilation takes long
            return state, {"zero": io_callback(lambda: callback() or np.int32(0), jax.ShapeDtypeStruct((), np.int32))}

        return step

    assert training.step_times({"slow": step_of(3), "fast": step_of(1)}, jnp.zeros(2)) == {"slow": 3, "fast": 1}
    assert calls == 5 * [3, 1]


@pytest.mark.parametrize("name", _COMPARED)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "argument --steps: must be a positive integer, got 0"),
        (["--batch-size", "-2"], "argument --batch-size: must be a positive integer, got -2"),
        (["--plot", "plot.pdf"], "argument --plot: must be a .png file in a folder that exists, got plot.pdf"),
    ],
)
def test_invalid_arguments_of_compared_scripts(run_example, capsys, name, arguments, message):
    with pytest.raises(SystemExit) as caught:
        run_example(name, *arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


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
