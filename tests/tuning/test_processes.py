"""In a program of several processes all of them take the choices of the first one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

_PROCESS = """
import sys
import jax
import jax.numpy as jnp
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
import jaxgrad
from jaxgrad._src.tuning import api

def conv(x, w):
    return jaxgrad.conv_general_dilated(x, w, (1,), "SAME", feature_group_count=2)

def measure(programs):  # each process has another fastest implementation
    assert jax.process_index() == 0
    return {name: 1 + (name != "xla") for name in programs}

api.medians = measure
tuning = jaxgrad.tune(conv, jnp.ones((2, 4, 30)), jnp.ones((4, 2, 3)), progress=False)
print([choice.implementation for choice in tuning.choices.values()])
tuning.save(sys.argv[3])
if jax.process_index() == 0:
    print(jaxgrad.Tuning.load(sys.argv[3]) == tuning)
else:
    print(jaxgrad.Tuning.load("missing.json") == tuning)
try:
    jaxgrad.Tuning.load("missing.json")
except (FileNotFoundError, RuntimeError) as error:
    print(type(error).__name__)
"""


def test_the_first_process_measures_and_reads(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONSAFEPATH": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _PROCESS, address, str(index), str(tmp_path / "tuning.json")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        found = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, found, strict=True):
        assert process.returncode == 0, errors
    assert [text.splitlines()[-3:] for text, _ in found] == [
        ["['xla']", "True", "FileNotFoundError"],
        ["['xla']", "True", "RuntimeError"],
    ]
