"""A source checkout without compiled modules refuses to be imported, and says how to build it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_importing_a_checkout_that_was_not_built(tmp_path):
    shutil.copytree(ROOT / "jaxgrad", tmp_path / "jaxgrad", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "ffi").mkdir()
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, "-c", "import sys, os; sys.path.insert(0, os.getcwd()); import jaxgrad"],
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
