"""examples/train_data_parallel.py in two processes of two CPU devices each comes to one process's training loss."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

_SCRIPT = Path(__file__).parents[1] / "examples" / "train_data_parallel.py"


def _start(*arguments, devices):
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    command = [sys.executable, str(_SCRIPT), "--epochs", "1", "--batch-size", "160", *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _outputs(processes):
    """What each printed; none outlives the test."""
    try:
        found = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, found, strict=True):
        assert process.returncode == 0, errors
    return [text for text, _ in found]


def test_two_processes_train_as_one_does(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    together = ("--processes", 2, "--coordinator", address, "--plot", tmp_path / "two.png")
    first, second = _outputs([_start(*together, "--process", i, devices=2) for i in range(2)])
    assert "devices: 4, of 2 processes" in first
    assert "loss" not in second
    (alone,) = _outputs([_start("--plot", tmp_path / "one.png", devices=1)])
    losses = [float(re.search(r"training loss: ([\d.]+)", text)[1]) for text in (first, alone)]
    # Rounding is all that differs, but some steps of training make it larger.
    assert abs(losses[0] - losses[1]) < 2e-3 * losses[1], losses
    assert (tmp_path / "two.png").stat().st_size > 10_000
