"""The directory in which compiled CUDA kernels are kept, with the fake driver and NVRTC of fake_cuda.c.

No GPU is needed. tests/conv/test_plan_store.py has the faults that all files of the directory share.
"""

from __future__ import annotations

import pytest
from cuda_module import NEEDS_CUDA_MODULE

pytestmark = NEEDS_CUDA_MODULE

_PRELUDE = """
import ctypes, json, warnings
import jax
OF_JAX
fake = ctypes.CDLL("libcuda.so.1")
import jaxgrad
from jaxgrad._src.native import cuda

cuda.gpu_ordinal = lambda: 0

def convolution(x, w):
    op = lambda x, w: jaxgrad.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=4, implementation="cuda")
    y, pullback = jax.vjp(op, x, w)
    return pullback(y)

def gru(x, w, r):
    return jaxgrad.gru(x, w, r, linear_before_reset=True, implementation="cuda")

def lowered(function, *shapes):
    arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    texts = [lowered(*call) for call in CALLS]
warned = [str(w.message) for w in caught if w.category is RuntimeWarning]
# without the empty program that tests NVRTC
print(json.dumps({"texts": texts, "compiled": fake.fake_compilations() - 1, "warned": warned}))
"""
_CONVOLUTION = "(convolution, (2, 9, 9, 4), (3, 3, 1, 4))"  # three passes
_GRU = "(gru, (5, 2, 32), (1, 96, 32), (1, 96, 32))"  # both passes


@pytest.fixture
def run(on_fake_cuda, tmp_path):
    """Lowers calls in a process of its own with a directory."""

    def run(*calls, directory=tmp_path, of_jax="", **environment):
        script = _PRELUDE.replace("CALLS", f"[{', '.join(calls)}]").replace("OF_JAX", of_jax)
        if directory is not None:
            environment["JAXGRAD_PLAN_CACHE_DIR"] = str(directory)
        return on_fake_cuda(script, **environment)

    return run


def test_kernels_are_compiled_once_for_all_processes(run, tmp_path):
    first = run(_CONVOLUTION, _GRU, FAKE_CUBIN="300001")
    assert first["compiled"] == len(list(tmp_path.glob("*.cubin"))) == 5
    second = run(_CONVOLUTION, _GRU, FAKE_CUBIN="300001", PYTHONHASHSEED="1")  # no fork: other hashes and addresses
    assert second == {**first, "compiled": 0}
    assert second["warned"] == []


def test_each_architecture_has_its_kernels(run):
    assert run(_GRU)["compiled"] == 2
    assert run(_GRU, FAKE_MAJOR="8")["compiled"] == 2
    assert run(_GRU)["compiled"] == 0


def test_a_missing_compiler_is_noticed(run):
    """The program that tests NVRTC is never read from the directory."""
    assert run(_GRU)["compiled"] == 2
    with pytest.raises(pytest.fail.Exception, match="the fake has a log"):
        run(_GRU, FAKE_NVRTC="6")


def test_a_damaged_file_is_replaced(run, tmp_path):
    run(_GRU)
    files = {path: path.read_bytes() for path in tmp_path.glob("*.cubin")}
    for damage in (lambda code: code[:-1], lambda code: code[:-2] + b"\1\n", lambda code: b""):
        for path, code in files.items():
            path.write_bytes(damage(code))
        assert run(_GRU)["compiled"] == 2
        assert {path: path.read_bytes() for path in files} == files


def test_an_unwritable_directory(run, tmp_path):
    """One warning; the kernels run."""
    (tmp_path / "file").touch()
    found = run(_CONVOLUTION, _GRU, directory=tmp_path / "file" / "directory")
    assert found["compiled"] == 5
    (warned,) = found["warned"]
    assert "compile kernels again" in warned
    assert str(tmp_path / "file" / "directory") in warned
    assert "Not a directory" in warned


def test_the_compilation_cache_of_jax(run, tmp_path, monkeypatch):
    """Without a directory of its own, jaxgrad takes one in JAX's cache, also where that is set later."""
    monkeypatch.delenv("JAXGRAD_PLAN_CACHE_DIR", raising=False)
    own, cache = tmp_path / "jaxgrad", {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    assert run(_GRU, directory="", **cache)["compiled"] == 2
    assert not own.exists()
    assert run(_GRU, directory=None, **cache)["compiled"] == 2
    assert len(list(own.glob("*.cubin"))) == 2
    later = f'jax.config.update("jax_compilation_cache_dir", {str(tmp_path)!r})'
    assert run(_GRU, directory=None, of_jax=f"import jaxgrad; {later}")["compiled"] == 0
    assert (
        run(_GRU, directory=None, of_jax=later.replace(repr(str(tmp_path)), "'gs://bucket/of/a/cloud'"))["compiled"]
        == 2
    )
