"""What every test shares: 64-bit types, and the implementations that each test of the op runs on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest
from targets import EVERY_OP, THOROUGH_ON_XLA, XLA, Target

import jaxgrad

jax.config.update("jax_enable_x64", True)
# On a GPU, products of float32 would otherwise be rounded to TF32, which no float32 tolerance allows.
jax.config.update("jax_default_matmul_precision", "highest")


def _gpus() -> int:
    try:
        return len(jax.devices("gpu"))
    except RuntimeError:
        return 0


# Compiling is most of what the suite costs on a CPU. running.py compiles some of its programs as users' are.
_OPTIMISES = bool(_gpus())
if _OPTIMISES:
    jaxgrad.config.update(search="heuristic")  # to time candidates takes longer than the tests do
else:
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="module")
def target(request: pytest.FixtureRequest) -> Target:
    """Each implementation in turn. Without the compiled module the kernel's tests fail: they are not skipped."""
    return request.param


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    own = any("target" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "target" in metafunc.fixturenames and not own:
        targets = getattr(metafunc.module, "TARGETS", EVERY_OP)
        params = [pytest.param(t, marks=_marks(metafunc, t)) for t in targets]
        metafunc.parametrize("target", params, indirect=True, scope="module", ids=str)


def _marks(metafunc: pytest.Metafunc, target: Target) -> list[pytest.MarkDecorator]:
    if target.platform == "gpu":
        return [pytest.mark.gpu]
    if target != XLA:
        return []
    module = Path(metafunc.module.__file__).stem
    thorough = module in THOROUGH_ON_XLA or metafunc.definition.get_closest_marker("thorough_on_xla")
    return [pytest.mark.scan] * module.startswith("test_gru") + [pytest.mark.thorough] * bool(thorough)


@pytest.fixture(scope="module", autouse=True)
def _forget_programs() -> Iterator[None]:
    """Drops the compiled programs of each module: together they would take gigabytes."""
    yield
    jax.clear_caches()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpus = _gpus()
    for item in items:
        if (mark := item.get_closest_marker("gpu")) and gpus < (needed := mark.kwargs.get("count", 1)):
            item.add_marker(
                pytest.mark.skip(reason=f"needs {needed} GPU{'s' * (needed > 1)}, JAX sees {gpus or 'none'}")
            )


@pytest.fixture(scope="session")
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a script in a fresh interpreter which imports jaxgrad and the tests' modules as this one does."""

    def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
        paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        usual = {"PYTHONPATH": os.pathsep.join(paths), "JAX_DISABLE_MOST_OPTIMIZATIONS": str(not _OPTIMISES)}
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, **usual, **environment},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        if done.returncode != 0:
            pytest.fail(f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}", pytrace=False)
        return done

    return run


@pytest.fixture(scope="session")
def fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the made-up libraries of fake_cuda.c."""
    folder = tmp_path_factory.mktemp("fake_cuda")
    source = Path(__file__).with_name("fake_cuda.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", source], check=True)
    for name in ("libcudnn.so.9", "libnvrtc.so.13"):
        (folder / name).symlink_to("libcuda.so.1")
    return folder
