"""Makes `benchmarks` importable, which is not installed.

The root of the checkout must not be on the path: it holds the sources of jaxgrad, without compiled modules.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "benchmarks"

if "benchmarks" not in sys.modules:
    _spec = importlib.util.spec_from_file_location("benchmarks", _FOLDER / "__init__.py")
    assert _spec is not None
    sys.modules["benchmarks"] = importlib.util.module_from_spec(_spec)
