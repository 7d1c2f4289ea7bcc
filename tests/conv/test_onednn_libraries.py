"""The choice between the oneDNN of the package and that of the system, and builds with other thread runtimes."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from jaxgrad._src.native import onednn

# The functions of the package's library under another version and thread runtime.
_SHIM = """
typedef struct { int major, minor, patch; const char *hash; unsigned cpu_runtime, gpu_runtime; } version_t;
static const version_t version = {3, MINOR, 1, "", RUNTIME, 0};
const version_t *dnnl_version(void) { return &version; }
"""
_RUNTIMES = {"sequential": 1, "OpenMP": 2, "TBB": 4}

_CALL = """
import runpy
import jax, jax.numpy as jnp, numpy as np
import jaxgrad

x = np.random.default_rng(0).standard_normal((2, 9, 40, 40), "float32")
w = np.random.default_rng(1).standard_normal((8, 9, 3, 5), "float32")

def gradients(conv, **settings):
    return jax.grad(lambda *a: jnp.sum(jnp.sin(conv(*a, (1, 1), "SAME", **settings))), (0, 1))(x, w)

expected = gradients(jax.lax.conv_general_dilated)
for found, reference in zip(gradients(jaxgrad.conv_general_dilated, implementation="onednn"), expected):
    np.testing.assert_allclose(found, reference, rtol=0, atol=1e-4 * np.abs(reference).max())
runpy.run_module("jaxgrad", run_name="__main__")
"""


@pytest.fixture
def shim(tmp_path):
    """Builds a library in a folder of its own, and returns its path."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    (package,) = onednn.library_paths((onednn.PACKAGE,), ("libdnnl.so.3",))

    def build(minor, threads, name="libdnnl.so.3.6"):
        source, path = tmp_path / "shim.c", tmp_path / name
        source.write_text(_SHIM.replace("MINOR", str(minor)).replace("RUNTIME", str(_RUNTIMES[threads])))
        linked = ("-Wl,--no-as-needed", package, f"-Wl,-rpath,{package.rpartition('/')[0]}")
        subprocess.run([compiler, "-shared", "-fPIC", "-o", path, source, *linked], check=True)
        return path

    return build


@pytest.mark.parametrize("threads", ["OpenMP", "TBB", "sequential"])
def test_newer_library_of_the_system_is_used(threads, shim, run_python):
    path = shim(99, threads)
    text = run_python(_CALL, LD_LIBRARY_PATH=str(path.parent), JAXGRAD_ONEDNN="").stdout
    assert f"\noneDNN        3.99.1, {threads}, {path}; not used: 3." in text, text
    assert f"package {onednn.PACKAGE} (not newer)\n" in text, text


def test_a_path_is_used_even_if_older(shim, run_python):
    path = shim(2, "OpenMP", "another.so")
    text = run_python(_CALL, JAXGRAD_ONEDNN=str(path)).stdout
    assert f"\noneDNN        3.2.1, OpenMP, {path}\n" in text, text


def test_invalid_choices_are_errors(run_python):
    script = "try: import jaxgrad\nexcept ValueError as error: print(error)"
    expected = "jaxgrad: JAXGRAD_ONEDNN must be 'package', 'system' or a path, got 'newest'"
    assert run_python(script, JAXGRAD_ONEDNN="newest").stdout.strip() == expected


class _Linker:
    """Stands for the compiled module: the libraries that there are, by path or name."""

    def __init__(self, **versions):
        self.libraries = {path.replace("_", "."): version for path, version in versions.items()}

    def describe_onednn(self, path):
        if path not in self.libraries:
            raise RuntimeError(f"{path}: cannot open shared object file: No such file or directory")
        if isinstance(version := self.libraries[path], str):
            raise RuntimeError(version)
        return version, "OpenMP", f"/lib/{path}"


_OLD_PACKAGE = "3.2.0, OpenMP, package onednn-cpu-gomp (not newer)"
_NO_FILE = "./pinned: cannot open shared object file: No such file or directory"
_ABSENT = "the system has no libdnnl.so.3 or libdnnl.so.3.6"
_BROKEN = "libtbb.so.12: cannot open shared object file: No such file or directory"


@pytest.mark.parametrize(
    ("choice", "system", "path", "others"),
    [
        ("", {}, "/lib/package", (_ABSENT,)),
        ("", {"libdnnl_so_3": (3, 1, 9)}, "/lib/package", ("3.1.9, OpenMP, /lib/libdnnl.so.3 (not newer)",)),
        ("", {"libdnnl_so_3": (3, 2, 0)}, "/lib/package", ("3.2.0, OpenMP, /lib/libdnnl.so.3 (not newer)",)),
        (
            "",
            {"libdnnl_so_3_6": (3, 10, 0)},
            "/lib/libdnnl.so.3.6",
            (_OLD_PACKAGE,),
        ),
        ("", {"libdnnl_so_3": _BROKEN}, "/lib/package", (_BROKEN,)),
        ("package", {"libdnnl_so_3": (3, 10, 0)}, "/lib/package", ()),
        ("system", {"libdnnl_so_3": (3, 1, 9)}, "/lib/libdnnl.so.3", ()),
        ("system", {}, None, (_ABSENT,)),
        (
            "./pinned",
            {"libdnnl_so_3": (3, 10, 0)},
            None,
            (_NO_FILE,),
        ),
    ],
)
def test_order(choice, system, path, others, monkeypatch):
    monkeypatch.setattr(onednn, "library_paths", lambda packages, names: ["package"])
    monkeypatch.setenv(onednn.VARIABLE, choice)
    found = onednn.find(_Linker(package=(3, 2, 0), **system))
    assert (found.library and found.library.path, found.others) == (path, others)


def test_other_machines_have_no_package(monkeypatch):
    monkeypatch.setattr(onednn, "library_paths", lambda packages, names: None)
    monkeypatch.setattr(onednn.platform, "machine", lambda: "aarch64")
    monkeypatch.setenv(onednn.VARIABLE, "")
    missing = "the package onednn-cpu-gomp is not installed (it does not exist for aarch64)"
    assert onednn.find(_Linker()) == (None, (_ABSENT, missing))
