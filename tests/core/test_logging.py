"""The logger "jaxgrad": what is selected and found. Nothing is logged at the level WARNING, the default."""

from __future__ import annotations

import logging
import re

import jax
import jax.numpy as jnp
import pytest

import jaxgrad

pytestmark = pytest.mark.jax_version

X, W = jnp.ones((2, 4, 9), "float32"), jnp.ones((6, 4, 3), "float32")


@pytest.fixture
def messages(caplog):
    """The messages from the level DEBUG on, of which none may be a warning."""
    caplog.set_level(logging.DEBUG, logger="jaxgrad")
    yield lambda: [f"{record.levelname} {record.getMessage()}" for record in caplog.records if record.name == "jaxgrad"]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING and record.name == "jaxgrad"]


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_selection(messages, implementation):
    def conv(x, w):
        return jaxgrad.conv_general_dilated(x, w, (1,), "VALID", implementation=implementation)

    jax.eval_shape(conv, X, W)
    found = [message for message in messages() if message.startswith("DEBUG conv_general_dilated, weight_gradient [")]
    assert len(found) == 1
    if implementation == "xla":
        assert "]: xla on cpu, xla on gpu" in found[0]
    else:
        assert re.search(r"\]: xla on cpu \(.*onednn: XLA is faster for so few multiplications\), \w+ on gpu", found[0])


def test_accelerated_selection(messages):
    conv = jaxgrad.accelerate(lambda x, w: jax.lax.conv_general_dilated(x, w, (1,), "VALID"))
    jax.jit(conv).lower(X, W)
    (line,) = [message for message in messages() if "DEBUG conv_general_dilated" in message]
    assert line.startswith("DEBUG conv_general_dilated, forward")
    assert " on cpu" in line
    assert " on gpu" not in line


def test_explain_logs_nothing(messages):
    jaxgrad.explain(jaxgrad.conv_general_dilated, X, W, (1,), "VALID")
    assert not messages()


def test_tuning(messages, tmp_path):
    tuning = jaxgrad.tune(lambda x, w: jaxgrad.conv_general_dilated(x, w, (1,), "VALID"), X, W, progress=False)
    (text,) = tuning.choices
    (measured,) = (m for m in messages() if "measured" in m)
    assert measured.startswith(f"INFO measured {text}: {tuning.choices[text].implementation}, in microseconds: ")
    tuning.save(tmp_path / "tuning.json")
    jaxgrad.Tuning.load(tmp_path / "tuning.json")
    assert messages()[-1].startswith("INFO 1 choices for ")
    assert messages()[-1].endswith("in the tuning " + str(tmp_path / "tuning.json"))


@pytest.mark.parametrize("level", ["INFO", "WARNING"])
def test_onednn(run_python, level):
    """The library is found when jaxgrad is imported."""
    script = "import jaxgrad; from jaxgrad._src.native import cpu; print(cpu.find_onednn().library)"
    done = run_python(
        f"import logging; logging.basicConfig(level={level!r}); import jax; {script}", JAX_PLATFORMS="cpu"
    )
    expected = f"INFO:jaxgrad:oneDNN {done.stdout.strip()}" if level == "INFO" else ""
    assert done.stderr.strip().startswith(expected)
    assert ("jaxgrad" in done.stderr) == (level == "INFO")
