"""Exceptions in handlers become errors of JAX, on the calling thread and on the threads of XLA's pool."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import jax
import pytest

pytestmark = pytest.mark.jax_version

_TESTS = Path(__file__).parents[1]
_FFI = _TESTS.parent / "ffi"

_SCRIPT = """
import ctypes, sys
import jax, numpy as np

library = ctypes.cdll.LoadLibrary({library!r})
expected = ["INTERNAL: {target}: too long", "RESOURCE_EXHAUSTED: {target}: out of host memory",
            "RESOURCE_EXHAUSTED: {target}: full", "FAILED_PRECONDITION: {target}: no library", "INTERNAL: {target}: "]
jax.ffi.register_ffi_target("{target}", jax.ffi.pycapsule(library.{target}), platform="cpu")
call = jax.ffi.ffi_call("{target}", jax.ShapeDtypeStruct((1,), "float32"))
for _ in range(20):
    for kind, message in enumerate(expected):
        try:
            jax.block_until_ready(call(kind=np.int64(kind)))
        except jax.errors.JaxRuntimeError as error:
            assert message in str(error), error
        else:
            raise AssertionError(f"no error, expected {{message}}")
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    built = tmp_path_factory.mktemp("throwing") / "throwing_handlers.so"
    sources = [_TESTS / "throwing_handlers.cc", _FFI / "common/handler.cc", _FFI / "cpu/runtime/xla_parallel.cc"]
    command = ["g++", "-std=c++17", "-w", "-shared", "-fPIC", "-pthread", f"-I{_FFI}", f"-I{jax.ffi.include_dir()}"]
    subprocess.run([*command, *sources, "-o", built], check=True)
    return str(built)


@pytest.mark.parametrize("target", ["throw_on_calling_thread", "throw_on_pool_threads"])
def test_exceptions_become_errors(target, library, run_python):
    run_python(_SCRIPT.format(library=library, target=target), JAX_PLATFORMS="cpu")


def test_every_handler_catches_exceptions():
    """No handler uses XLA's macro, which lets exceptions through."""
    macro = re.compile(r"\bXLA_FFI_DEFINE_HANDLER\w*")
    sources = [path for ending in ("cc", "h", "cu", "cuh") for path in _FFI.rglob(f"*.{ending}")]
    found = {path.relative_to(_FFI).as_posix() for path in sources if macro.search(path.read_text())}
    assert found == {"common/handler.h"}
