"""The directory in which the exhaustive search keeps its choices, when it is damaged, hostile, full or shared.

With the fakes of fake_cuda.c; no GPU is needed. A search runs again where its choice cannot be read.
"""

from __future__ import annotations

import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from cuda_module import NEEDS_CUDA_MODULE

pytestmark = NEEDS_CUDA_MODULE

_PRELUDE = """
import os, warnings
from fake_gpu import *
warnings.simplefilter("always")

def engines(sizes=(9,)):
    "The engines, the warnings, and whether candidates were timed."
    with warnings.catch_warnings(record=True) as caught:
        found = [engine(size) for size in sizes]
    warned = [str(w.message) for w in caught if w.category is RuntimeWarning]
    return {"engines": found, "warned": warned, "timed": fake.fake_executions() > 0}
"""
_ONE = "report(**engines())"
_CHOICE = [["engine 12", 300]]


@pytest.fixture
def run(on_fake_cuda, tmp_path):
    """Runs a script in its own process, with a directory of plans. Returns the values that it passes to `report`."""

    def run(script, directory=tmp_path / "plans", **environment):
        return on_fake_cuda(_PRELUDE + script, JAXGRAD_PLAN_CACHE_DIR=str(directory), **environment)

    return run


@pytest.fixture
def stored(run, tmp_path):
    """The file of one choice."""
    assert run(_ONE) == {"engines": _CHOICE, "warned": [], "timed": True}
    (path,) = (tmp_path / "plans").glob("*.plan")
    return path


def _names(path):
    return sorted(found.name for found in path.iterdir())


def test_temporary_files_of_killed_processes_are_removed(run, stored):
    """Those that are older than an hour by the clock of the file system. Nothing else is."""
    folder, name = stored.parent, stored.name
    old, young = time.time() - 2 * 60 * 60, time.time() - 30 * 60
    files = {
        f"{name}.123456": old,
        f"{'0' * 16}.plan.7": old,
        f"{name}.654321": young,
        "notes.txt.123": old,
        f"{name}.12a": old,
        f"{'1' * 16}.plan": old,
    }
    for file, modified in files.items():
        (folder / file).write_text("half a pl")
        os.utime(folder / file, (modified, modified))
    (folder / f"{name}.99").mkdir()
    (folder / f"{name}.98").symlink_to("/etc/hostname")
    os.utime(folder / f"{name}.99", (old, old))
    os.utime(folder / f"{name}.98", (old, old), follow_symlinks=False)
    before = _names(folder)
    assert run(_ONE)["timed"] is False
    assert _names(folder) == before  # only a process that writes removes files
    assert run("report(**engines((10,)))")["timed"]
    assert set(before) - set(_names(folder)) == {f"{name}.123456", f"{'0' * 16}.plan.7"}


def test_a_process_that_writes_slowly_loses_only_its_file(run, stored):
    """Files that vanish while a directory is cleaned or written are no error."""
    script = "report(found=[engines((size,)) for size in range(10, 30)])"
    folder = stored.parent
    disturb = f"while :; do rm -f {folder}/*.plan.*; touch -d '2 hours ago' {folder}/0.plan.1; done"
    stop = subprocess.Popen(["sh", "-c", disturb])
    try:
        found = run(script)["found"]
    finally:
        stop.kill()
        stop.wait()
    assert all(one["engines"] == _CHOICE for one in found)


_HOSTILE = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "random bytes": lambda path: path.write_bytes(os.urandom(999)),
    "zeros": lambda path: path.write_bytes(bytes(999)),
    "of a terabyte": lambda path: os.truncate(path, 1 << 40),
    "a link": lambda path: (path.rename(path.with_name("other")), path.symlink_to("other")),
    "a link to itself": lambda path: (path.unlink(), path.symlink_to(path.name)),
    "a link to memory": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("kind", _HOSTILE)
def test_a_hostile_file_is_ignored_and_replaced(run, stored, kind):
    before = stored.read_bytes()
    _HOSTILE[kind](stored)
    found = run(_ONE)
    assert found["engines"] == _CHOICE
    assert found["timed"]
    if kind == "a directory":
        (warned,) = found["warned"]
        assert "Is a directory" in warned
    else:
        assert found["warned"] == []
        assert not stored.is_symlink()
        assert stored.read_bytes() == before
        assert run(_ONE)["timed"] is False


@pytest.mark.parametrize("directory", ["/proc/self/fd", "/dev/full", "/dev/full/plans", "/proc/plans"])
def test_a_directory_that_cannot_be_written(run, directory):
    """One warning for all calls."""
    found = run("report(**engines((9, 10, 11)))", directory)
    assert found["engines"] == 3 * _CHOICE
    (warned,) = found["warned"]
    assert directory in warned


def test_a_full_disk(run, tmp_path):
    """A write that ends early: one warning, no half file and no temporary file; with space, the choice is stored."""
    script = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as where the disk is full, a write is cut off and then fails
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
limited = engines((9, 10))
files = os.listdir(os.environ["JAXGRAD_PLAN_CACHE_DIR"])
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
report(limited=limited, files=files, later=engines((11,)))
"""
    found = run(script, PYTHONHASHSEED="1")  # no fork, whose output is a file, which the limit would cut
    assert found["limited"]["engines"] == 2 * _CHOICE
    (warned,) = found["limited"]["warned"]
    assert "File too large" in warned
    assert found["files"] == []
    assert found["later"]["engines"] == _CHOICE
    assert sorted(name.rpartition(".")[2] for name in _names(tmp_path / "plans")) == ["checks", "plan"]


def test_eight_processes_share_a_directory(run, tmp_path):
    """Some are killed while they write. The others find complete files or none."""
    folder = tmp_path / "plans"
    many = "report(**engines([*range(9, 40)] * 2))"
    killed = "import threading\nthreading.Timer(0.05, lambda: os.kill(os.getpid(), 9)).start()\n" + many

    def one(index):
        if index % 4:
            return run(many)
        with pytest.raises(pytest.fail.Exception, match="exit status -9"):
            run(killed)
        return None

    with ThreadPoolExecutor(8) as pool:
        found = [result for result in pool.map(one, range(8)) if result is not None]
    assert all(result["engines"] == 62 * _CHOICE and result["warned"] == [] for result in found)
    assert len([name for name in _names(folder) if name.endswith(".plan")]) == 31
    found = run(many, PYTHONHASHSEED="1")  # no fork: other hashes and addresses
    assert found == {"engines": 62 * _CHOICE, "warned": [], "timed": False}
