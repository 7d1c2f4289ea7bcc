"""Over a mesh the shards are measured, and a choice for a shard is followed."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxgrad
from jaxgrad._src.choice.environment import current_environment
from jaxgrad._src.choice.measured_choices import Choice

pytestmark = pytest.mark.jax_version

_SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
import jax
jax.config.update("jax_num_cpu_devices", 2)
import test_mesh
test_mesh.check()
"""


def _conv(x, w):
    return jaxgrad.conv_general_dilated(x, w, (1, 2), "SAME", feature_group_count=2)


def _gradients(x, w):
    return jax.grad(lambda x, w: jnp.sum(jnp.sin(_conv(x, w))), (0, 1))(x, w)


def check():
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((6, 4, 9, 7), (4, 2, 3, 2)))
    expected = jax.jit(_gradients)(x, w)
    mesh = Mesh(jax.devices()[:2], "batch")
    x = jax.device_put(x, NamedSharding(mesh, PartitionSpec("batch")))
    w = jax.device_put(w, NamedSharding(mesh, PartitionSpec()))
    tuning = jaxgrad.tune(_gradients, x, w, progress=False)
    texts = list(tuning.choices)
    assert len(texts) == 3, texts
    assert all("x=f32[3,4,9,7] NCHW" in text for text in texts), texts
    own = next(name for name in tuning.choices[texts[0]].times_us if name != "xla")
    step = jax.jit(_gradients)
    for chosen, other in ((own, "xla"), ("xla", own)):
        choice = Choice(chosen, other, {chosen: 1.0, other: 2.0})
        with jaxgrad.Tuning({current_environment(): dict.fromkeys(texts, choice)}):
            compiled = step.lower(x, w).compile()
            found = step(x, w)
        kernels = compiled.as_text().count('custom_call_target="jaxgrad_')
        assert kernels == (0 if chosen == "xla" else 3), (chosen, kernels)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), found, expected)


@pytest.mark.gpu(count=2)
def test_shards_on_gpus():
    check()


def test_shards_on_cpus(run_python):
    run_python(_SCRIPT.format(folder=str(Path(__file__).parent)), JAX_PLATFORMS="cpu")
