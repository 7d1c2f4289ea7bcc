"""Accelerated programs shared between processes: exported modules and JAX's persistent compilation cache."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest
from accelerated import PASSES, close, network, network_arrays, passes
from jax import export
from op_cases import values_and_gradients

import jaxgrad

pytestmark = pytest.mark.jax_version

_RESTORE = """
import sys
import jax, numpy as np
from jax import export
import jaxgrad  # registers the handlers
from accelerated import network_arrays
with open({path!r}, "rb") as file:
    exported = export.deserialize(file.read())
np.savez({path!r}, *jax.tree.leaves(exported.call(*network_arrays())))
"""


def test_an_exported_module_runs_in_a_fresh_process(run_python, tmp_path):
    pytest.importorskip("flatbuffers", reason="JAX serializes with flatbuffers")
    run = jax.jit(partial(values_and_gradients, jaxgrad.accelerate(network, implementation="onednn")))
    exported = export.export(run, disabled_checks=jaxgrad.export_disabled_checks())(*network_arrays())
    assert set(passes(exported.mlir_module())) == PASSES
    path = tmp_path / "module"
    path.write_bytes(exported.serialize())
    run_python(_RESTORE.format(path=str(path)), JAX_PLATFORMS="cpu")
    with np.load(tmp_path / "module.npz") as found:
        close(list(found.values()), jax.tree.leaves(run(*network_arrays())))


def test_export_without_disabled_checks_raises():
    run = jax.jit(jaxgrad.accelerate(network, implementation="onednn"))
    with pytest.raises(ValueError, match="jaxgrad_onednn_conv_forward"):
        export.export(run)(*network_arrays())


def test_symbolic_shapes_run_on_xla():
    """The batch is symbolic. An accelerated program with known shapes uses the kernels."""
    run = jax.jit(partial(values_and_gradients, jaxgrad.accelerate(network, implementation="onednn")))
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in network_arrays()]
    shapes[0] = jax.ShapeDtypeStruct(export.symbolic_shape("b, 4, 6, 5"), shapes[0].dtype)
    exported = export.export(run)(*shapes)
    assert set(passes(exported.mlir_module())) == {"xla"}
    close(exported.call(*network_arrays()), run(*network_arrays()))


def test_export_for_two_platforms():
    """Each platform has its own kernels, or XLA's convolution."""
    run = jax.jit(partial(values_and_gradients, jaxgrad.accelerate(network, implementation="onednn")))
    checks = jaxgrad.export_disabled_checks()
    exported = export.export(run, platforms=["cpu", "cuda"], disabled_checks=checks)(*network_arrays())
    close(exported.call(*network_arrays()), run(*network_arrays()))
    assert {*PASSES, "xla"} >= set(passes(exported.mlir_module())) >= {"xla"}


_OVER_A_MESH = """
import jax, numpy as np
from functools import partial
from accelerated import close, network, network_arrays, passes
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from op_cases import values_and_gradients
import jaxgrad
run = jax.jit(partial(values_and_gradients, jaxgrad.accelerate(network, implementation="onednn")))
expected = run(*network_arrays())
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,))
    placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(network_arrays(), (P("d"), P(), P()))]
    exported = export.export(run, disabled_checks=jaxgrad.export_disabled_checks())(*placed)
    assert exported.nr_devices == 2
    restored = export.deserialize(exported.serialize())
    print(kind.name, *sorted(passes(exported.mlir_module())))
    close(jax.jit(restored.call)(*placed), expected)
"""


def test_export_over_a_mesh(run_python):
    """Over automatic axes JAX cannot export the partitioned kernels, and the program has the convolutions of XLA."""
    pytest.importorskip("flatbuffers", reason="JAX serializes with flatbuffers")
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    automatic, explicit = run_python(_OVER_A_MESH, **environment).stdout.splitlines()
    assert automatic == "Auto xla"
    assert explicit == " ".join(["Explicit", *sorted(PASSES)])


_CACHED = """
import hashlib
from collections import Counter
from functools import partial
import jax, numpy as np
from accelerated import network, network_arrays
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from op_cases import values_and_gradients
import jaxgrad
events, digest = Counter(), hashlib.sha256()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event.rsplit("/", 1)[-1]]))
sharding = NamedSharding(jax.make_mesh((jax.device_count(),), ("d",), axis_types=(AxisType.Auto,)), P())
arrays = [jax.device_put(array, sharding) for array in network_arrays()]
for function in network, jaxgrad.accelerate(network, implementation="onednn"):
    for leaf in jax.tree.leaves(jax.jit(partial(values_and_gradients, function))(*arrays)):
        digest.update(np.asarray(leaf).tobytes())
print(events["cache_hits"], events["cache_misses"], digest.hexdigest())
"""


@pytest.mark.parametrize("devices", [1, 2])
def test_the_persistent_compilation_cache(run_python, tmp_path, devices):
    """A marked and an unmarked program are different entries, and a second process compiles neither."""
    environment = {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY": "1",
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    (hits, misses, digest), again = (run_python(_CACHED, **environment).stdout.split() for _ in range(2))
    assert int(hits) == 0
    assert int(misses) >= 2
    assert again == [misses, "0", digest]
