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
    Case(T=70, B=33, I=9, H=20, direction="bidirectional", linear_before_reset=True),  # several chunks and tasks
    Case(T=0, B=3, I=4, H=5),
    Case(T=4, B=0, I=4, H=5),
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


@pytest.fixture
def on_cpu():
    """Also where JAX's default device is a GPU."""
    with jax.default_device(CPU_KERNEL.device):
        yield


def _loss(x, w, r, time_major):
    """Of time-major x: the transposes are part of it."""
    given, lens = x if time_major else jnp.swapaxes(x, 0, 1), jnp.arange(x.shape[1])
    y, y_h = jaxgrad.gru(given, w, r, None, lens, time_major=time_major, implementation="cpu")
    y, y_h = (y, y_h) if time_major else (jnp.moveaxis(y, 0, 2), jnp.swapaxes(y_h, 0, 1))
    return jnp.sum(jnp.sin(y)) + jnp.sum(y_h**2)


def _arrays(*groups, D=1, T=5, B=4, I=3, H=6):  # noqa: E741
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (*groups, T, B, I), (*groups, D, 3 * H, I), (*groups, D, 3 * H, H)
    return [jax.random.normal(key, shape) / 2 for key, shape in zip(keys, shapes, strict=True)]


@pytest.mark.parametrize("in_axes", [(0, None, None), (2, None, None), (0, 0, 0), (0, None, 0)], ids=str)
def test_vmap(on_cpu, in_axes):
    """Of examples, each with its own gradients of shared weights, and of groups with their own weights."""
    arrays = [a[0] if axis is None else jnp.moveaxis(a, 0, axis) for a, axis in zip(_arrays(3), in_axes, strict=True)]

    def gradients(time_major):
        of_one = jax.grad(partial(_loss, time_major=time_major), (0, 1, 2))
        return jax.jit(jax.vmap(of_one, in_axes))(*arrays)

    for found, expected in zip(gradients(False), gradients(True), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def _transposed(program):
    """The arrays with 11 steps and 13 rows that a program transposes, or copies to another order of these axes."""
    found = []
    for line in program.splitlines():
        if moved := re.search(r"\[([\d,]+)\]\{([\d,]+)\} (transpose|copy)\(%([\w.-]+)\)", line):
            sizes, layout, kind, operand = moved.groups()
            orders = [layout, re.search(rf"%{re.escape(operand)} = \w+\[[\d,]+\]\{{([\d,]+)\}}", program)[1]]
            axes = [[int(i) for i in order.split(",") if sizes.split(",")[int(i)] != "1"] for order in orders]
            if {"11", "13"} <= set(sizes.split(",")) and (kind == "transpose" or axes[0] != axes[1]):
                found.append(line)
    return found


def _gradients(op, **settings):
    def loss(x, w, r, dy):
        return jnp.vdot(op(x, w, r, **settings)[0], dy)

    return jax.grad(loss, (0, 1, 2))


def _between_transposes(x, w, r, **settings):
    y, y_h = jaxgrad.gru(jnp.swapaxes(x, 0, 1), w, r, **settings)
    return jnp.moveaxis(y, 2, 0), y_h


def _program(function, *arrays):
    # The optimizations of a user's program, which conftest.py disables.
    options = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
    return jax.jit(function).lower(*arrays).compile(options).as_text()


@pytest.mark.parametrize("in_axes", [None, (0, 0, 0, 0), (0, None, None, 0)], ids=str)
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_cpu_kernels_take_the_arrays_as_they_are(on_cpu, direction, in_axes):
    """The compiled program transposes no array with steps and rows, of groups neither, and fewer of examples."""
    x, w, r = _arrays(*[3] * (in_axes is not None), D=1 + (direction == "bidirectional"), T=11, B=13)
    if in_axes is not None and in_axes[1] is None:
        w, r = w[0], r[0]
    x = jnp.swapaxes(x, -3, -2)
    dy = jnp.ones((*x.shape[:-1], w.shape[-3], r.shape[-1]))
    found = []
    for op in partial(jaxgrad.gru, time_major=False), _between_transposes:
        gradients = _gradients(op, direction=direction, implementation="cpu")
        program = _program(jax.vmap(gradients, in_axes) if in_axes else gradients, x, w, r, dy)
        assert "jaxgrad_cpu_gru_backward" in program
        found.append(len(_transposed(program)))
    ours, between_transposes = found
    assert ours < between_transposes
    # The forward pass folds examples into the batch: a reshape is between the transposes, and XLA keeps some.
    assert ours == 0 or in_axes == (0, None, None, 0)


def test_flax_layers_take_the_arrays_as_they_are(on_cpu):
    linen = pytest.importorskip("flax.linen")
    from jaxgrad.nn.linen import RNN

    layer, x = RNN(linen.GRUCell(6)), jnp.ones((13, 11, 3), jnp.float32)
    variables = layer.init(jax.random.key(0), x)
    program = _program(jax.grad(lambda v, x: jnp.sum(jnp.sin(layer.apply(v, x))), (0, 1)), variables, x)
    assert "jaxgrad_cpu_gru_backward" in program
    assert not _transposed(program), program
