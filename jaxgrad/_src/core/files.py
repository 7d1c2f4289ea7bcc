"""Writes files in one step."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path


def replace_file(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Writes a file. An error or the end of the process during the write leaves the old content.

    Its permissions stay. A link is followed, as `open` does. The temporary file beside it has a name that nobody can
    guess, and no link is followed there. A file that is not regular, such as /dev/stdout, is opened and written.

    Args:
      path: the file.
      content: text, which is encoded as UTF-8, or bytes.

    Raises:
      OSError: the file cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        old = os.stat(path)
    except FileNotFoundError:
        old = None
    if old is not None and not stat.S_ISREG(old.st_mode):
        Path(path).write_bytes(data)
        return
    try:
        _replace(os.path.realpath(path), data, None if old is None else stat.S_IMODE(old.st_mode))
    except OSError as error:
        error.filename, error.filename2 = os.fspath(path), None  # the name that the caller knows
        raise


def _replace(path: str, data: bytes, permissions: int | None) -> None:
    temporary = os.path.join(os.path.dirname(path), f".jaxgrad-{secrets.token_hex(16)}.unfinished")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o666 if permissions is None else 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            if permissions is not None:
                os.fchmod(descriptor, permissions)
        os.replace(temporary, path)
    except BaseException:  # an interrupt too
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
