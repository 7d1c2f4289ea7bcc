"""examples/train_data_parallel.py reaches the loss of one device: on several devices, in one process and two."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import free_address, outputs

_SCRIPT = Path(__file__).parents[2] / "examples" / "train_data_parallel.py"


def _environment(platform, devices):
    """Environment of a process that sees only these devices: a number of CPU devices, or GPUs by index."""
    if platform == "cpu":
        flags = f"--xla_force_host_platform_device_count={len(devices)}"
        return {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": flags}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(max(devices) + 1)))).split(",")
    return {
        "JAX_PLATFORMS": "cuda",
        "CUDA_VISIBLE_DEVICES": ",".join(visible[place] for place in devices),
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }


def _start(platform, devices, *arguments):
    command = [sys.executable, str(_SCRIPT), "--epochs", "1", "--batch-size", "160", *map(str, arguments)]
    # Python does not add the script's folder itself where PYTHONSAFEPATH is set.
    paths = [str(_SCRIPT.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **_environment(platform, devices)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _loss(text):
    return float(re.search(r"training loss: ([\d.]+)", text)[1])


@pytest.mark.parametrize(
    ("platform", "parts", "together"),
    [("cpu", [[0, 1], [2, 3]], None), pytest.param("gpu", [[0], [1]], [0, 1], marks=pytest.mark.gpu(count=2))],
    ids=["cpu", "gpu"],
)
def test_two_processes_train_as_one_does(tmp_path, platform, parts, together):
    """Each process has a part of the devices. On GPUs, one process with all devices is compared too."""
    two = ("--processes", 2, "--coordinator", free_address(), "--plot", tmp_path / "two.png")
    first, second = outputs([_start(platform, part, *two, "--process", i) for i, part in enumerate(parts)], 200)
    assert f"devices: {sum(map(len, parts))}, of 2 processes" in first
    assert "loss" not in second
    losses = [_loss(first)]
    if together:
        (text,) = outputs([_start(platform, together, "--plot", tmp_path / "together.png")], 200)
        assert f"devices: {len(together)}, of 1 process\n" in text
        losses.append(_loss(text))
    (alone,) = outputs([_start(platform, [0], "--plot", tmp_path / "one.png")], 200)
    # Only rounding differs, and the steps of training amplify it.
    for loss in losses:
        assert abs(loss - _loss(alone)) < 2e-3 * _loss(alone), (losses, alone)
    assert (tmp_path / "two.png").stat().st_size > 10_000
