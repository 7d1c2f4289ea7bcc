"""A checkout without compiled modules, or with those of another version, refuses to run and names the remedy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxgrad import _cpu
from jaxgrad._src.native.ffi import ffi_call

ROOT = Path(__file__).parents[2]


_IMPORT_CHECKOUT = """
import os, sys
sys.meta_path = [finder for finder in sys.meta_path if isinstance(finder, type)]  # without that of an editable install
sys.path.insert(0, os.getcwd())
import jaxgrad
"""


def test_importing_a_checkout_that_was_not_built(tmp_path):
    shutil.copytree(ROOT / "jaxgrad", tmp_path / "jaxgrad", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "ffi").mkdir()
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT_CHECKOUT],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    error = done.stderr.splitlines()[-1]
    assert error.startswith(f"ImportError: jaxgrad is imported from the source checkout {tmp_path}, which has no")
    assert "pip install -e ." in error


_STALE = """
import sys, types
stale = types.ModuleType("jaxgrad._cpu")
stale.__file__, stale.isa_error, stale.registrations = "/old/_cpu.so", str, dict
sys.modules["jaxgrad._cpu"] = stale
try:
    import jaxgrad
except AttributeError as error:
    print(error)
"""


def test_importing_a_compiled_module_of_another_version(run_python):
    assert run_python(_STALE, JAXGRAD_ONEDNN="").stdout.strip() == (
        "jaxgrad: /old/_cpu.so was compiled from another version of jaxgrad than its Python files: it lacks "
        "'describe_onednn'. Delete this file and install jaxgrad again, in a checkout with `pip install -e .`."
    )
    assert not hasattr(_cpu, "torch")  # tools look for names in all modules


def test_a_handler_that_the_compiled_modules_lack():
    y = jax.ShapeDtypeStruct((3,), np.float32)
    with pytest.raises(ImportError, match="lack the handler 'jaxgrad_cpu_newer'"):
        jax.eval_shape(lambda x: ffi_call("jaxgrad_cpu_newer", [y], [x], 0, named={"x": x}), y)
