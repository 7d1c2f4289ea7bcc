"""JAX's persistent cache of compiled programs, over a mesh of devices."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest
from mesh_running import close, import_test_module
from op_cases import OPS, OpCase, op_case, values_and_gradients

pytestmark = pytest.mark.jax_version

# For each op, settings that change the result and no shape.
_CHANGES = {
    "conv_general_dilated": {"padding": ((0, 1), (2, 0))},
    "conv_transpose": {"padding": ((2, 0), (0, 2))},
    "batch_norm_training": {"epsilon": 0.5},
    "batch_norm_inference": {"epsilon": 0.5},
    "gru": {"linear_before_reset": False},
    "max_pool": {"padding": ((0, 1), (1, 0))},
    "avg_pool": {"padding": ((0, 1), (1, 0))},
    **{name: {"epsilon": 0.5} for name in ("group_norm", "layer_norm", "rms_norm")},
}

_SCRIPT = """
from collections import Counter
import jax
events = Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event.rsplit("/", 1)[-1]]))
module.save_results({path!r}, {changed})
print(events["cache_hits"], events["cache_misses"])
"""


def _cases(changed: bool) -> list[OpCase]:
    cases = [op_case(op) for op in OPS]
    if not changed:
        return cases
    return [case._replace(settings={**case.settings, **_CHANGES[op]}) for op, case in zip(OPS, cases, strict=True)]


def _run(case: OpCase):
    return jax.jit(partial(values_and_gradients, case.call("cpu")))


def save_results(path: str, changed: bool) -> None:
    """Saves the results of every op over two devices."""
    devices = jax.make_mesh((2,), ("d",))
    everywhere = jax.sharding.NamedSharding(devices, jax.sharding.PartitionSpec())
    found = [_run(case)(*jax.device_put(case.arrays, everywhere)) for case in _cases(changed)]
    np.savez(path, *jax.tree.leaves(found))


def test_persistent_cache_over_a_mesh(run_python, tmp_path):
    """With cache keys without callback addresses: programs are found again, and none is confused with another."""
    environment = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY": "1",
    }

    def counts(changed: bool) -> list[int]:
        path = str(tmp_path / f"{changed}.npz")
        script = import_test_module(__file__, "module") + _SCRIPT.format(path=path, changed=changed)
        return [*map(int, run_python(script, **environment).stdout.split())]

    hits, misses = counts(changed=False)
    assert hits == 0
    assert misses >= len(OPS)
    assert counts(changed=False) == [misses, 0]
    _, missed = counts(changed=True)
    assert missed >= len(OPS)
    expected = {changed: [_run(case)(*case.arrays) for case in _cases(changed)] for changed in (False, True)}
    for changed, results in expected.items():
        with np.load(tmp_path / f"{changed}.npz") as found:
            close(list(found.values()), jax.tree.leaves(results))
    for one, other in zip(*expected.values(), strict=True):
        assert [a.shape for a in jax.tree.leaves(one)] == [a.shape for a in jax.tree.leaves(other)]
        assert np.abs(one[0][0] - other[0][0]) > 1e-3  # the losses
