"""Calls outside `jax.jit` with many shapes: one program for each, and `jax.clear_caches` frees what they keep."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.jax_version

_SCRIPT = """
import gc, sys
import jax, numpy as np
import jaxgrad
from jaxgrad._src.run.named_jit import PassName

def ones(*shape):
    return np.ones(shape, np.float32)

calls = {
    "conv_general_dilated": lambda n: jaxgrad.conv_general_dilated(
        ones(4, 16, 20, n), ones(16, 16, 3, 3), (1, 1), "SAME"
    ),
    "conv_transpose": lambda n: jaxgrad.conv_transpose(ones(2, 20, n, 16), ones(3, 3, 16, 16), (2, 2), "SAME"),
    "batch_norm_training": lambda n: jaxgrad.batch_norm_training(ones(8, n, 16), ones(16), ones(16)),
    "gru": lambda n: jaxgrad.gru(ones(n, 4, 8), ones(1, 24, 8), ones(1, 24, 8)),
    "max_pool": lambda n: jaxgrad.max_pool(ones(8, n, 16), (2,)),
}
def cached():
    "The number of entries by cache. A cache without a limit holds nothing that depends on shapes."
    modules = [module for name, module in sys.modules.items() if name.startswith("jaxgrad.")]
    caches = {each for module in modules for each in vars(module).values() if hasattr(each, "cache_parameters")}
    sizes = {f"{each.__module__}.{each.__name__}": each.cache_info() for each in caches}
    return {name: info.currsize for name, info in sizes.items() if info.maxsize and "jaxgrad" in name}

def names():
    "The names of the jitted passes that are alive."
    return [each for each in gc.get_objects() if isinstance(each, PassName)]

programs = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: programs.append(event) if event.endswith("/backend_compile_duration") else None
)
for name, call in calls.items():
    call(20)
    programs.clear()
    for n in (21, 22, 23):
        call(n)
    print(name, len(programs))
    assert len(programs) == 3, (name, len(programs))
before, entries = len(names()), cached()
print(before, entries)
assert before >= 8 and entries["jaxgrad._src.conv.read.op_call._read"] >= 8, entries
jax.clear_caches()
gc.collect()
assert not names() and not any(cached().values()), (names(), cached())
for call in calls.values():
    call(20)
"""


def test_programs_for_many_shapes(run_python):
    run_python(_SCRIPT)
