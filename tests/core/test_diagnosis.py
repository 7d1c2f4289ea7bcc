"""The report of `python -m jaxgrad`, with and without the compiled module."""

from __future__ import annotations

import importlib.metadata

import jax
import pytest

import jaxgrad

pytestmark = pytest.mark.jax_version

_RUN = "import runpy; runpy.run_module('jaxgrad', run_name='__main__')"


def test_the_diagnosis(run_python):
    from jaxgrad import _cpu

    text = run_python(_RUN).stdout
    for part in (
        jaxgrad.__version__,
        jax.__version__,
        importlib.metadata.version("jaxlib"),
        "FFI API",
        _cpu.build_info()["ffi_api"],
        "jaxgrad_cpu_gru_forward",
        "jaxgrad_cpu_gru_backward",
        jax.devices()[0].device_kind,
        "gru on cpu: 'cpu'",
    ):
        assert part in text, f"{part!r} is not in:\n{text}"


def test_the_diagnosis_without_the_compiled_module(run_python):
    text = run_python(f"import sys; sys.modules['jaxgrad._cpu'] = None; {_RUN}").stdout
    for part in (
        jax.__version__,
        "missing",
        "the compiled module cannot be loaded",
        "jaxgrad._cpu",
        "gru on cpu: 'xla'",
    ):
        assert part in text, f"{part!r} is not in:\n{text}"
    assert "jaxgrad_cpu_gru_forward" not in text


def test_the_diagnosis_without_a_working_device(run_python):
    """If JAX finds no device, the report says so and continues."""
    text = run_python(_RUN, JAX_PLATFORMS="no_such_platform").stdout
    assert "no_such_platform" in text
    assert jax.__version__ in text


def test_diagnosis_runs_as_a_module(run_python):
    script = (
        "import subprocess, sys\n"
        "done = subprocess.run([sys.executable, '-m', 'jaxgrad'], capture_output=True, text=True)\n"
        "print(done.returncode, done.stdout)"
    )
    assert run_python(script).stdout.startswith("0 jaxgrad")
