"""Programs shared between processes: exported modules and JAX's persistent compilation cache."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest
from jax import export
from op_cases import OPS, op_case, values_and_gradients

import jaxgrad

pytestmark = pytest.mark.jax_version

_RESTORE = """
import os, sys
import jax, numpy as np
from jax import export
import jaxgrad  # registers the handlers
for name in os.listdir("."):
    with open(name, "rb") as file:
        exported = export.deserialize(file.read())
    rng = np.random.default_rng(0)
    arrays = [1 + rng.random(a.shape, a.dtype) for a in exported.in_avals]
    np.savez(name, *jax.tree.leaves(exported.call(*arrays)))
"""


def test_an_exported_module_runs_in_a_fresh_process(run_python, tmp_path):
    pytest.importorskip("flatbuffers", reason="JAX serializes with flatbuffers")
    expected = {}
    for op in OPS:
        case = op_case(op)
        run = jax.jit(partial(values_and_gradients, case.call("cpu")))
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in case.arrays]
        exported = export.export(run, platforms=["cpu"], disabled_checks=jaxgrad.export_disabled_checks())(*shapes)
        assert case.kernel in exported.mlir_module()
        (tmp_path / op).write_bytes(exported.serialize())
        rng = np.random.default_rng(0)
        expected[op] = jax.tree.leaves(run(*(1 + rng.random(a.shape, a.dtype) for a in case.arrays)))
    run_python(f"import os; os.chdir({str(tmp_path)!r})" + _RESTORE, JAX_PLATFORMS="cpu")
    for op, leaves in expected.items():
        with np.load(tmp_path / f"{op}.npz") as found:
            for a, b in zip(found.values(), leaves, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_export_without_disabled_checks_raises():
    """`export` requires the disabled checks of exactly the handlers in the program."""
    case = op_case("batch_norm_inference")
    call = jax.jit(case.call("cpu"))
    with pytest.raises(ValueError, match=case.kernel):
        export.export(call)(*case.arrays)
    others = [check for check in jaxgrad.export_disabled_checks() if check.is_custom_call() != case.kernel]
    with pytest.raises(ValueError, match=case.kernel):
        export.export(call, disabled_checks=others)(*case.arrays)


_CACHED = """
import hashlib
from collections import Counter
from functools import partial
import jax, numpy as np
from op_cases import OPS, op_case, values_and_gradients
events, digest = Counter(), hashlib.sha256()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event.rsplit("/", 1)[-1]]))
for op in OPS:
    case = op_case(op)
    results = jax.jit(partial(values_and_gradients, case.call("cpu")))(*case.arrays)
    for leaf in jax.tree.leaves(results):
        digest.update(np.asarray(leaf).tobytes())
print(events["cache_hits"], events["cache_misses"], digest.hexdigest())
"""


def test_the_persistent_compilation_cache(run_python, tmp_path):
    """A second process compiles nothing, and its results are bitwise equal to those of the first."""
    environment = {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    (hits, misses, digest), again = (run_python(_CACHED, **environment).stdout.split() for _ in range(2))
    assert int(hits) == 0
    assert int(misses) >= len(OPS)
    assert again == [misses, "0", digest]
