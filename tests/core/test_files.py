"""Files that jaxgrad writes: in one step, through no link that others have made, with the permissions they had."""

from __future__ import annotations

import os
import resource
import stat
import threading

import pytest

from jaxgrad._src.core import files


def _permissions(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_planted_link_is_not_followed(tmp_path, monkeypatch):
    """Even if somebody guesses the name of the temporary file."""
    monkeypatch.setattr(files.secrets, "token_hex", lambda _: "guessed")
    path, victim, planted = tmp_path / "file", tmp_path / "victim", tmp_path / ".jaxgrad-guessed.unfinished"
    victim.write_text("precious")
    planted.symlink_to(victim)
    with pytest.raises(FileExistsError):
        files.replace_file(path, "text")
    assert victim.read_text() == "precious"
    assert planted.is_symlink()
    monkeypatch.undo()
    files.replace_file(path, "text")
    assert path.read_text() == "text"


@pytest.mark.parametrize("permissions", [0o600, 0o640, 0o664])
def test_permissions_stay(tmp_path, permissions):
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(permissions)
    files.replace_file(path, "new")
    assert (path.read_text(), _permissions(path)) == ("new", permissions)


def test_permissions_of_a_new_file(tmp_path):
    old = os.umask(0o027)
    try:
        files.replace_file(tmp_path / "file", b"new")
    finally:
        os.umask(old)
    assert _permissions(tmp_path / "file") == 0o640


def test_an_error_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            files.replace_file(path, "x" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert raised.value.filename == str(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_name_as_long_as_the_file_system_allows(tmp_path):
    path = tmp_path / ("n" * 255)
    files.replace_file(path, "text")
    assert path.read_text() == "text"


def test_a_pipe_is_written_to():
    """As /dev/stdout is."""
    read, write = os.pipe()
    with open(read, encoding="utf-8") as reader:
        writer = threading.Thread(target=files.replace_file, args=(f"/dev/fd/{write}", "text"))
        writer.start()
        writer.join()
        os.close(write)
        assert reader.read() == "text"
