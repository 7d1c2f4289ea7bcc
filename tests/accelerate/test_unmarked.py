"""Programs without marked convolutions: jaxgrad leaves no trace in them."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accelerated import network, network_arrays
from op_cases import loss

import jaxgrad

pytestmark = pytest.mark.jax_version

_PROGRAM = """
import os, hashlib
import jax, numpy as np
from jax import lax, numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

def network(x, w):
    y = lax.conv_general_dilated(x, w, (1, 2), "SAME", feature_group_count=2)
    y = lax.conv_transpose(jnp.tanh(y), w, (2, 1), "SAME", dimension_numbers=("NCHW", "IOHW", "NCHW"))
    return jnp.sum(jnp.sin(y))

arrays = np.cos(np.arange(2 * 4 * 6 * 5, dtype="float32")).reshape(2, 4, 6, 5), np.ones((4, 2, 3, 3), "float32")
if os.environ["IMPORTED"] == "1":
    import jaxgrad
    used = jax.jit(jax.grad(jaxgrad.accelerate(network), (0, 1)))
    used(*arrays), jaxgrad.accelerate(network)(*arrays), jaxgrad.report(used, *arrays)
    with jaxgrad.accelerate(implementation="onednn"):
        network(*arrays)
gradient = jax.jit(jax.grad(network, (0, 1)))
mesh = jax.make_mesh((2,), ("d",))
placed = [jax.device_put(a, NamedSharding(mesh, P(*spec))) for a, spec in zip(arrays, (("d",), ()))]
abstract = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh.abstract_mesh, P())) for a in arrays]
for lowered in gradient.lower(*arrays), gradient.lower(*placed):
    print(lowered.as_text())
    print(lowered.compile().as_text())
for platform in ("cpu", "cuda"):
    print(gradient.trace(*arrays).lower(lowering_platforms=(platform,)).as_text())
    print(gradient.trace(*abstract).lower(lowering_platforms=(platform,)).as_text())
print(jax.jit(jax.vmap(network, (0, None))).lower(np.stack(arrays[:1] * 2), arrays[1]).as_text())
print([np.asarray(a).tobytes().hex() for a in (*gradient(*arrays), *jax.grad(network, (0, 1))(*arrays))])
"""


def test_an_unmarked_program_is_the_same_as_without_jaxgrad(run_python):
    """Lowered and compiled, on one device and over a mesh, after accelerate was used for the same function."""
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    without, imported = (run_python(_PROGRAM, IMPORTED=used, **environment).stdout for used in "01")
    assert len(without) > 20_000
    assert "convolution" in without
    assert imported == without


def _compiled(function, *args):
    """The instructions of a compiled program, without source locations."""
    text = jax.jit(function).lower(*args).compile().as_text()
    text = re.sub(r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*", "", text, flags=re.MULTILINE)
    return re.sub(r",? ?metadata=\{[^}]*\}", "", text)


def _without_mark(text, mark):
    return re.sub(r",? ?frontend_attributes=\{\}", "", re.sub(rf'jaxgrad="{mark}",?', "", text))


def test_a_marked_program_without_convolutions_compiles_to_the_same_instructions():
    def function(x):
        y = jnp.dot(jnp.tanh(x), x.T)
        return jnp.sum(jax.lax.scan(lambda c, row: (c + jnp.sin(row), c * row), y[0], y)[1])

    x = np.ones((4, 3), np.float32)
    plain = _compiled(jax.grad(function), x)
    marked = _compiled(jax.grad(jaxgrad.accelerate(function)), x)
    assert 'frontend_attributes={jaxgrad="auto"' in marked
    assert _without_mark(marked, "auto") == plain


def test_an_op_outside_of_accelerate_has_no_mark():
    def convolve(implementation, x, w):
        return jaxgrad.conv_general_dilated(x, w, (1, 2), "SAME", feature_group_count=2, implementation=implementation)

    x, w = np.ones((2, 4, 6, 5), np.float32), np.ones((4, 2, 3, 3), np.float32)
    for implementation in (None, "xla"):
        assert "jaxgrad =" not in jax.jit(convolve, static_argnums=0).lower(implementation, x, w).as_text()


def test_switched_off_programs_compile_to_the_same_instructions():
    """The convolutions too: the mark of implementation="xla" is an attribute and nothing else."""

    def gradient(function):
        return jax.grad(lambda *arrays: loss(function(*arrays)), (0, 1, 2))

    off = jaxgrad.accelerate(network, implementation="xla")
    marked = _compiled(gradient(off), *network_arrays())
    assert _without_mark(marked, "xla") == _compiled(gradient(network), *network_arrays())
