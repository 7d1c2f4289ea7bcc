"""Programs of several processes on this machine."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Sequence


def free_address() -> str:
    """An address for the coordinator of `jax.distributed`."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def outputs(processes: Sequence[subprocess.Popen[str]], timeout: float) -> list[str]:
    """The output of each process, which must succeed. Kills processes that do not end."""
    try:
        found = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, found, strict=True):
        assert process.returncode == 0, errors
    return [text for text, _ in found]
