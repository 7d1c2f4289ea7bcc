"""In a program of several processes all of them take the choices of the first one."""

from __future__ import annotations

import os
import subprocess
import sys

from processes import free_address, outputs

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
    address = free_address()
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
    assert [text.splitlines()[-3:] for text in outputs(processes, 120)] == [
        ["['xla']", "True", "FileNotFoundError"],
        ["['xla']", "True", "RuntimeError"],
    ]
