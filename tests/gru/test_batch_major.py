"""`time_major=False`: values and gradients, and the CPU kernels, which read and write arrays with the batch first."""

from __future__ import annotations

import re
from functools import partial

import gru_references
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import CPU_KERNEL, GRU
from gru_cases import Case, Cotangents, make_inputs
from gru_running import values_and_gradients
from tolerances import assert_results_close

import jaxgrad

BACKENDS = GRU
CASES = [
    Case(T=6, B=3, I=5, H=7),
    Case(T=6, B=5, I=4, H=17, direction="bidirectional", linear_before_reset=True),
    Case(T=5, B=4, I=3, H=6, direction="reverse").bare(),
    Case(T=70, B=33, I=9, H=20, linear_before_reset=True),  # several chunks of steps and tasks of rows
]
ROWS = ("x", "initial_h", "reset", "reset_h")


@pytest.mark.thorough_on_xla
@pytest.mark.parametrize("remat_every", [None, 2])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(backend, case, remat_every):
    """They are those of the time-major call, with the batch first."""
    inputs, cotangents = make_inputs(case, backend.widest)
    rows = {name for name in ROWS if getattr(inputs, name) is not None}
    swapped = inputs._replace(**{name: np.swapaxes(getattr(inputs, name), 0, 1) for name in rows})
    back = Cotangents(np.moveaxis(cotangents.y, 2, 0), np.swapaxes(cotangents.y_h, 0, 1))
    settings = {**case.settings, "time_major": False, "remat_every": remat_every}
    y, y_h, gradients = values_and_gradients(backend, swapped, back, settings)
    gradients = gradients._replace(
        **{name: np.swapaxes(getattr(gradients, name), 0, 1) for name in rows - {"reset"}},
    )
    expected = gru_references.values_and_gradients(inputs, cotangents, **case.settings)
    actual = np.moveaxis(y, 0, 2), np.swapaxes(y_h, 0, 1), gradients
    assert_results_close(actual, expected, dtype=backend.widest, terms=case.terms, backend=backend)


def _loss(x, w, r, time_major, **settings):
    """Of time-major x: the transposes are part of it."""
    given = x if time_major else jnp.swapaxes(x, 0, 1)
    y, y_h = jaxgrad.gru(given, w, r, time_major=time_major, implementation="cpu", **settings)
    y, y_h = (y, y_h) if time_major else (jnp.moveaxis(y, 0, 2), jnp.swapaxes(y_h, 0, 1))
    return jnp.sum(jnp.sin(y)) + jnp.sum(y_h**2)


def _arrays(*groups, D=1, T=5, B=4, I=3, H=6):  # noqa: E741
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (*groups, T, B, I), (*groups, D, 3 * H, I), (*groups, D, 3 * H, H)
    return [jax.random.normal(key, shape) / 2 for key, shape in zip(keys, shapes, strict=True)]


@pytest.mark.parametrize("in_axes", [(0, None, None), (2, None, None), (0, 0, 0), (0, None, 0)], ids=str)
def test_vmap(in_axes):
    """Of examples, whose gradients of weights are sums of one each, and of groups with their own weights."""
    arrays = [a if axis is not None else a[0] for a, axis in zip(_arrays(3), in_axes, strict=True)]
    arrays = [jnp.moveaxis(a, 0, axis or 0) if axis else a for a, axis in zip(arrays, in_axes, strict=True)]

    def gradients(time_major):
        of_one = jax.grad(partial(_loss, time_major=time_major), (0, 1, 2))
        return jax.jit(jax.vmap(of_one, in_axes))(*arrays)

    for found, expected in zip(gradients(False), gradients(True), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def _transposed(program):
    """The sizes of the arrays with 11 steps and 13 rows that a program transposes.

    XLA copies some arrays too, in the same order, if they have dimensions of size 1.
    """
    found = re.findall(r"\[([\d,]+)\]\S* transpose\(", program)
    return [sizes for sizes in found if {"11", "13"} <= set(sizes.split(","))]


@pytest.mark.parametrize("groups", [(), (3,)], ids=["one", "groups"])
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_cpu_kernels_take_the_arrays_as_they_are(groups, direction):
    """The compiled program transposes no array with rows and steps."""
    x, w, r = _arrays(*groups, D=1 + (direction == "bidirectional"), T=11, B=13)
    x = jnp.swapaxes(x, -3, -2)

    def loss(x, w, r, dy):
        y, _ = jaxgrad.gru(x, w, r, direction=direction, time_major=False, implementation="cpu")
        return jnp.vdot(y, dy)

    dy = jnp.ones((*x.shape[:-1], w.shape[-3], r.shape[-1]))
    gradients = jax.grad(loss, (0, 1, 2))
    program = jax.jit(jax.vmap(gradients) if groups else gradients).lower(x, w, r, dy).compile().as_text()
    assert "jaxgrad_cpu_gru_backward" in program
    assert not _transposed(program), program


def test_flax_layers_take_the_arrays_as_they_are():
    linen = pytest.importorskip("flax.linen")
    from jaxgrad.nn.linen import RNN

    layer, x = RNN(linen.GRUCell(6)), jnp.ones((13, 11, 3), jnp.float32)
    variables = layer.init(jax.random.key(0), x)
    with jax.default_device(CPU_KERNEL.device):
        loss = jax.jit(jax.grad(lambda variables, x: jnp.sum(jnp.sin(layer.apply(variables, x))), (0, 1)))
        program = loss.lower(variables, x).compile().as_text()
    assert "jaxgrad_cpu_gru_backward" in program
    assert not _transposed(program), program
