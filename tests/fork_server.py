"""Runs scripts in forks of an interpreter that has imported JAX, because the import takes a second.

JAX has no backend yet, and jaxgrad is not imported. The scripts of one server differ from fresh interpreters in these
points: they share the seed of hashes, addresses and NumPy's random numbers, OpenBLAS has one thread, and stdout and
stderr are files.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

READ_LATER = ("FAKE_", "JAXGRAD_", "PYTEST_")  # prefixes of variables that neither the loader nor JAX's import reads


class ForkServer:
    """An interpreter that forks for each script. Several threads may call it at once."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        single = {**environment, "OPENBLAS_NUM_THREADS": "1"}  # a fork has none of the other threads
        # In a session of its own, an interrupt from the keyboard does not end the server; the end of its input does.
        settings: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}
        self._process = subprocess.Popen([sys.executable, __file__], env=single, **settings)

    def run(self, script: str, environment: Mapping[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
        """Like `subprocess.run` of `python -c script`. A script that takes longer is killed.

        The environment may differ from that of the interpreter in the variables `READ_LATER`.
        """
        with tempfile.TemporaryDirectory() as folder:
            outputs = [Path(folder, name) for name in ("stdout", "stderr")]
            pid = self._request(script, dict(environment), os.getcwd(), *map(str, outputs))
            descriptor = os.pidfd_open(pid)  # the server keeps the child until its status is requested
            has_ended = False
            try:
                ends = select.poll()
                ends.register(descriptor, select.POLLIN)
                has_ended = bool(ends.poll(1e3 * timeout))
            finally:
                if not has_ended:
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                os.close(descriptor)
                status = self._request(pid)
            stdout, stderr = (path.read_text() for path in outputs)
            if not has_ended:
                raise subprocess.TimeoutExpired(script, timeout, stdout, stderr)
            return subprocess.CompletedProcess(script, status, stdout, stderr)

    def _request(self, *request: Any) -> int:
        with self._lock:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()  # type: ignore[union-attr]
        if not answer:
            raise RuntimeError(f"the interpreter that forks ended with status {self._process.wait()}")
        return int(answer)

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()


def _next_script() -> str | None:
    """Serves requests. Returns the script in the child that is to run it, and None at the end of the input."""
    while line := sys.stdin.readline():
        first, *more = json.loads(line)
        if not more:
            print(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]), flush=True)
            continue
        assert len(os.listdir("/proc/self/task")) == 1, "a fork has none of the other threads"
        assert "jaxgrad" not in sys.modules
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of JAX, which has no threads before its first backend
            pid = os.fork()
        if not pid:
            _become(*more)
            return first
        print(pid, flush=True)
    return None


def _become(environment: Mapping[str, str], directory: str, stdout: str, stderr: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    for descriptor, path in enumerate((os.devnull, stdout, stderr)):
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(file, descriptor)
        os.close(file)


if __name__ == "__main__":
    import jax
    import jax.numpy  # noqa: F401

    script = _next_script()
    if script is not None:  # the child ends as any interpreter does
        sys.argv = ["-c"]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(script, "<string>", "exec", dont_inherit=True), vars(main))
