"""In a program of several processes all of them take the choices of the first one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from processes import free_address, outputs

from jaxgrad._src.native import cpu

pytestmark = [pytest.mark.jax_version, pytest.mark.skipif(bool(cpu.onednn_unavailable()), reason="needs oneDNN")]

_PROCESS = """
import sys
import jax
import jax.numpy as jnp
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
import jaxgrad
from jaxgrad._src.tuning import choices

def conv(x, w):
    return jaxgrad.conv_general_dilated(x, w, (1,), "SAME", feature_group_count=2)

def measure(programs):  # each process has another fastest implementation
    assert jax.process_index() == 0
    return {name: 1 + (name != "xla") for name in programs}

choices.medians = measure
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

_UNLIKE_PROCESSES = """
import dataclasses
import pickle
import sys
import warnings
import jax
import jax.numpy as jnp
from jaxgrad._src.choice import environment

index = int(sys.argv[2])
environment._cpu_model = lambda: f"CPU {index}"
jax.distributed.initialize(sys.argv[1], 2, index)
import jaxgrad
from jaxgrad._src.choice.measured_choices import Choice
from jaxgrad._src.tuning import choices

choices.medians = lambda programs: {name: 1 + (name != "xla") for name in programs}

@jax.jit
def conv(x, w):
    return jaxgrad.conv_general_dilated(x, w, (1,), "SAME", feature_group_count=2)

arrays = jnp.ones((2, 4, 30)), jnp.ones((4, 2, 3))

def show(name, tuning):
    jaxgrad.config.update(tuning=tuning)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        for _ in range(2):
            kernels = conv.lower(*arrays).as_text().count("@jaxgrad_")
            jax.clear_caches()
    causes = ["CPU 0" if "not 'CPU 0" in str(w.message) else "unknown" for w in caught if "tuning" in str(w.message)]
    print(name, kernels, len(tuning.choices), causes)
    jaxgrad.config.update(tuning=None)

here = environment.current_environment()
kinds = (here.device_kind.replace(f"CPU {index}", model) for model in ("CPU 0", "CPU 1"))
first, second = (dataclasses.replace(here, device_kind=kind) for kind in kinds)

def load(machines):
    jaxgrad.Tuning(machines).save(sys.argv[3])
    return jaxgrad.Tuning.load(sys.argv[3])

show("built by hand", jaxgrad.Tuning({here: {"conv": Choice("xla", "cpu", {"xla": 1.0, "cpu": 2.0})}}))

tuned = jaxgrad.tune(conv, *arrays, progress=False)
show("tuned", tuned)
choices = dict(tuned.choices)
own = {text: dataclasses.replace(choice, implementation="onednn") for text, choice in choices.items()}
show("loaded", load({first: choices}))
show("first of both", load({second: own, first: choices}))
show("second alone", load({second: choices}))
show("merged", load({second: own}) | load({first: choices}))
show("merged, own last", load({first: choices}) | load({first: own}))
show("copied", pickle.loads(pickle.dumps(tuned)))
"""


def _run(program, tmp_path):
    address = free_address()
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONSAFEPATH": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, address, str(index), str(tmp_path / "tuning.json")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    lines = (text.splitlines() for text in outputs(processes, 120))
    return [[line for line in printed if not line.startswith("[Gloo]")] for printed in lines]


def test_the_first_process_measures_and_reads(tmp_path):
    assert _run(_PROCESS, tmp_path) == [
        ["['xla']", "True", "FileNotFoundError"],
        ["['xla']", "True", "RuntimeError"],
    ]


def test_processes_on_unlike_machines_lower_the_same_program(tmp_path):
    """The machine of the first process decides for all. Without a choice, oneDNN runs the convolution."""
    expected = [
        "built by hand 1 0 ['unknown']",
        "tuned 0 1 []",
        "loaded 0 1 []",
        "first of both 0 1 []",
        "second alone 1 0 ['CPU 0']",
        "merged 0 1 []",
        "merged, own last 1 1 []",
        "copied 0 1 []",
    ]
    assert _run(_UNLIKE_PROCESSES, tmp_path) == [expected, expected]
