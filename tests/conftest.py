"""Settings and fixtures of the whole suite: JAX's configuration, the backends of each test, and subprocesses."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import pytest
from backends import EVERY_OP, THOROUGH_ON_XLA, XLA, Backend
from cuda_module import ENGINES, NO_CUDA_MODULE
from fork_server import READ_LATER, ForkServer
from pairwise import distinct_parameters, each_value, pairwise

from jaxgrad._src.conv.call.geometry import ConvGeometry
from jaxgrad._src.native import cuda

_TESTS = Path(__file__).parent
os.environ.setdefault("KERAS_BACKEND", "jax")  # Keras reads it where it is first imported


def _gpus() -> int:
    try:
        return len(jax.devices("gpu"))
    except RuntimeError:
        return 0


def _optimizes(config: pytest.Config) -> bool:
    return config.getoption("jax_defaults") or bool(_gpus())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--jax-defaults",
        action="store_true",
        help="leave JAX configured as it is for users: 32-bit types, all optimizations, and TF32 products on a GPU",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("jax_defaults"):
        return
    jax.config.update("jax_enable_x64", True)
    # On a GPU, JAX would otherwise round the operands of float32 products to TF32, which no float32 tolerance allows.
    jax.config.update("jax_default_matmul_precision", "highest")
    # Compilation takes most of the suite's time on a CPU. gru_running.py compiles some programs with optimizations.
    jax.config.update("jax_disable_most_optimizations", not _optimizes(config))


@pytest.fixture(scope="module")
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each backend of the test module in turn. Without the compiled module the tests of its kernels fail."""
    return request.param


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    own = any("backend" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "backend" in metafunc.fixturenames and not own:
        backends = getattr(metafunc.module, "BACKENDS", EVERY_OP)
        params = [pytest.param(b, marks=_marks(metafunc, b)) for b in backends]
        metafunc.parametrize("backend", params, indirect=True, scope="module", ids=str)


def _marks(metafunc: pytest.Metafunc, backend: Backend) -> list[pytest.MarkDecorator]:
    if backend.platform == "gpu":
        return [pytest.mark.gpu]
    if backend != XLA:
        return []
    module = Path(metafunc.module.__file__).relative_to(_TESTS).with_suffix("").as_posix()
    thorough = module in THOROUGH_ON_XLA or metafunc.definition.get_closest_marker("thorough_on_xla")
    return [pytest.mark.scan] * module.startswith("gru/") + [pytest.mark.thorough] * bool(thorough)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks the tests that need PyTorch: those with the fixture, and those of a module that imports it."""
    own, installed = getattr(getattr(item, "module", None), "torch", None), sys.modules.get("torch")
    if "torch" in getattr(item, "fixturenames", ()) or (own is not None and own is installed):
        item.add_marker(pytest.mark.torch)


@pytest.fixture(scope="session")
def torch() -> ModuleType:
    """PyTorch, without which the test is skipped."""
    return pytest.importorskip("torch")


@pytest.fixture(scope="module", autouse=True)
def _clear_compiled_programs() -> Iterator[None]:
    """Drops the compiled programs after each test module: those of the whole suite would take gigabytes."""
    yield
    jax.clear_caches()


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _leave_pairs(items)
    _mark_oldest(items)
    gpus = _gpus()
    for item in items:
        if (mark := item.get_closest_marker("gpu")) and gpus < (needed := mark.kwargs.get("count", 1)):
            item.add_marker(
                pytest.mark.skip(reason=f"needs {needed} GPU{'s' * (needed > 1)}, JAX sees {gpus or 'none'}")
            )
        if item.get_closest_marker("cuda_module") and not cuda.targets():
            item.add_marker(pytest.mark.skip(reason=NO_CUDA_MODULE))


def pytest_collection_finish() -> None:
    """Leaves 700,000 objects, of the tests and what they import, out of all later garbage collections."""
    gc.collect()
    gc.freeze()


def _leave_pairs(items: list[pytest.Item]) -> None:
    """Marks cases of tests with three or more parameters, or with the mark each_value, as thorough: see pairwise.py.

    All GPU tests stay.
    """
    tests: dict[tuple[str, bool], list[Any]] = {}  # a build without the CUDA module skips the tests that need it
    for item in items:
        if hasattr(item, "callspec") and not any(item.iter_markers("gpu")) and not any(item.iter_markers("thorough")):
            key = item.nodeid.partition("[")[0], any(item.iter_markers("cuda_module"))
            tests.setdefault(key, []).append(item)
    for cases in tests.values():
        choose = each_value if cases[0].get_closest_marker("each_value") else pairwise
        kept = choose(_values(cases))
        for index, item in enumerate(cases):
            if index not in kept:
                item.add_marker(pytest.mark.thorough)


def _values(cases: list[Any]) -> list[tuple[Hashable, ...]]:
    """The values of the parameters of each case of one test."""
    return distinct_parameters([[id(value) for value in item.callspec.params.values()] for item in cases])


def _mark_oldest(items: list[pytest.Item]) -> None:
    """Marks the cases that CI runs with the oldest JAX.

    Of tests that depend on the release of JAX, those with each value of a parameter: see pairwise.py. Of the CUDA
    module, which the README's command does not build, every second case of tests with many.
    """
    tests: dict[tuple[str, bool], list[Any]] = {}
    for item in items:
        if any(any(item.iter_markers(name)) for name in ("gpu", "thorough", "newest")):
            continue
        of_cuda = any(item.iter_markers("cuda_module"))
        if of_cuda or any(item.iter_markers("jax_version")):
            tests.setdefault((item.nodeid.partition("[")[0], of_cuda), []).append(item)
    for (_, of_cuda), cases in tests.items():
        if of_cuda:
            kept = {*range(0, len(cases), 2 if len(cases) > _FEW else 1)}
        else:
            kept = each_value(_values(cases)) if hasattr(cases[0], "callspec") else {0}
        for index in kept:
            cases[index].add_marker(pytest.mark.oldest)


_FEW = 8  # cases of a test of the CUDA module that all run
_SECONDS = 240  # that a script may take


@pytest.fixture(scope="session")
def environment_of_scripts(pytestconfig: pytest.Config) -> Callable[..., dict[str, str]]:
    """The environment in which a script imports the installed jaxgrad and the helper modules of tests/."""

    def environment_of_scripts(**more: str) -> dict[str, str]:
        paths = [str(_TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        defaults = {
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONSAFEPATH": "1",  # the working directory may hold the sources of jaxgrad, without compiled modules
            "JAX_DISABLE_MOST_OPTIMIZATIONS": str(not _optimizes(pytestconfig)),
        }
        return {**os.environ, **defaults, **more}

    return environment_of_scripts


def _successful(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    if done.returncode != 0:
        pytest.fail(f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}", pytrace=False)
    return done


@pytest.fixture(scope="session")
def run_python(environment_of_scripts) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a script in a fresh interpreter."""

    def run(script: str, seconds: float = _SECONDS, **environment: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=environment_of_scripts(**environment),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        return _successful(done)

    return run


@pytest.fixture(scope="session")
def fork_python(environment_of_scripts) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Like `run_python`, in a fork of an interpreter that has imported JAX: for tests that run many scripts.

    There is an interpreter for each combination of the variables that are read before or while JAX is imported.
    """
    servers: dict[frozenset[tuple[str, str]], ForkServer] = {}
    starting = threading.Lock()

    def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
        every = environment_of_scripts(**environment)
        early = frozenset((name, value) for name, value in every.items() if not name.startswith(READ_LATER))
        with starting:
            if early not in servers:
                servers[early] = stack.enter_context(ForkServer(dict(early)))
        return _successful(servers[early].run(script, every, _SECONDS))

    with contextlib.ExitStack() as stack:
        yield run


@pytest.fixture
def run_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., str]:
    """Runs the main() of a script in examples/ with 32-bit types and returns its output."""
    monkeypatch.syspath_prepend(_TESTS.parent / "examples")
    monkeypatch.chdir(tmp_path)

    def run(name: str, *arguments: str) -> str:
        with jax.enable_x64(False):
            importlib.import_module(name).main(arguments)
        return capsys.readouterr().out

    return run


@pytest.fixture(scope="session")
def reference_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with the reference kernels for each type, built from reference_kernels.cc."""
    folder = tmp_path_factory.mktemp("reference_kernels")
    flags = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{_TESTS}", f'-DKERNELS="{folder}/kernels.h"']
    spec = (0, 1, 2)
    layout = ConvGeometry(spec, spec, spec, (1,), ((0, 0),), (1,), 1, (1,), (1,)).attributes()
    sources = [folder / f"{number}.cc" for number in range(4)]
    for number, source in enumerate(sources):
        program = cuda.module.reference_program(0, number, 3 * [(1, 1, 1)], layout)
        (folder / "kernels.h").write_text(program["source"])  # the same for every type
        source.write_text(f'{program["definitions"]}#include "reference_kernels.cc"\n')
    library = folder / "libfake_kernels.so"
    subprocess.run(["g++", *flags, "-o", library, *sources], check=True)
    return library


@pytest.fixture(scope="session")
def fake_cuda(tmp_path_factory: pytest.TempPathFactory, reference_kernels: Path) -> Path:
    """A directory with fake CUDA libraries: fake_cuda.c, the reference kernels, and fake_gpu_calls.c."""
    folder = tmp_path_factory.mktemp("fake_cuda")
    (folder / reference_kernels.name).symlink_to(reference_kernels)
    build = ["gcc", "-O2", "-shared", "-fPIC", f"-I{jax.ffi.include_dir()}", f"-I{_TESTS}", "-o"]
    subprocess.run([*build, folder / "libcuda.so.1", _TESTS / "fake_cuda.c"], check=True)
    subprocess.run([*build, folder / "libfake_gpu_calls.so", _TESTS / "fake_gpu_calls.c"], check=True)
    for name in ("libcudnn.so.9", "libnvrtc.so.13"):
        (folder / name).symlink_to("libcuda.so.1")
    return folder


@pytest.fixture
def on_fake_cuda(run_python, fork_python, fake_cuda: Path) -> Callable[..., Any]:
    """Runs a script in a process of its own with the fake CUDA libraries. Returns its last line, which is JSON."""

    def run(script: str, **environment: str) -> Any:
        libraries = {"LD_LIBRARY_PATH": str(fake_cuda), "JAX_PLATFORMS": "cpu", "FAKE_ENGINES": ENGINES}
        usual = all(name.startswith(READ_LATER) for name in environment)
        done = (fork_python if usual else run_python)(script, **(libraries | environment))
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture(scope="session")
def kernel_emulation() -> Path:
    """The C++ header with which g++ compiles a CUDA kernel for the CPU."""
    return _TESTS / "kernel_emulation.h"
