"""`jaxgrad.nn.equinox.scan_gru` against `jax.lax.scan` over the cell."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from converted_gru import B, H, I, T, assert_trees_close, normal
from rnn_cases import program_of, values_and_gradients

import jaxgrad
from jaxgrad.nn.equinox import scan_gru

pytestmark = pytest.mark.jax_version

XS, INIT = jnp.asarray(normal(B, T, I)), jnp.asarray(normal(B, H))


def _cell(use_bias=True, dtype=jnp.float64):
    return eqx.nn.GRUCell(I, H, use_bias, dtype, key=jax.random.key(0))


def _scan(cell, init, xs, reverse=False, reset=None):
    """As users of equinox write it."""

    def step(h, inputs):
        x, zero = inputs
        h = cell(x, jnp.where(zero, 0, h))
        return h, h

    reset = jnp.zeros(xs.shape[0], bool) if reset is None else reset
    return jax.lax.scan(step, init, (xs, reset), reverse=reverse)


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("options", [{}, {"reverse": True}], ids=str)
def test_values_and_gradients(options, use_bias):
    args = _cell(use_bias), INIT[0], XS[0]
    found, expected = (
        values_and_gradients(lambda *args, run=run: run(*args, **options), *args) for run in (scan_gru, _scan)
    )
    assert_trees_close(found, expected)


def test_batches():
    """Under `jax.vmap` the sequences are rows of one call, and so are batch dimensions of the arguments."""
    cell, reset = _cell(), np.random.default_rng(0).random((B, T)) < 0.4

    def over_rows(run):
        return lambda cell, init, xs, reset: jax.vmap(lambda h, x, z: run(cell, h, x, reset=z))(init, xs, reset)

    def over_arrays(cell, init, xs, reset):
        last, states = scan_gru(cell, init, xs.swapaxes(0, 1), reset=reset.T)
        return last, states.swapaxes(0, 1)

    args = cell, INIT, XS
    runs = [lambda *args, run=run: run(*args, reset) for run in (over_rows(scan_gru), over_arrays, over_rows(_scan))]
    *found, expected = (values_and_gradients(run, *args) for run in runs)
    for results in found:
        assert_trees_close(results, expected)
    program = program_of(jax.grad(lambda cell: sum(a.sum() for a in runs[0](cell, INIT, XS))), cell)
    assert f"f64[{T},{B},{I}]" in program
    assert f"f64[{B},1,{3 * H},{I}]" not in program  # no weight gradients of single rows


@pytest.mark.parametrize("shape", [(0, T), (B, 0)], ids=str)
def test_empty(shape):
    last, states = jax.vmap(lambda xs: scan_gru(_cell(), INIT[0], xs))(jnp.zeros((*shape, I)))
    assert_trees_close((last, states), (jnp.tile(INIT[0], (shape[0], 1)), jnp.zeros((*shape, H))))


def test_ensemble():
    keys = jax.random.split(jax.random.key(0), 3)
    cells = eqx.filter_vmap(lambda key: eqx.nn.GRUCell(I, H, dtype=jnp.float64, key=key))(keys)
    found, expected = (
        eqx.filter_vmap(lambda cell, run=run: run(cell, INIT[0], XS[0]))(cells) for run in (scan_gru, _scan)
    )
    assert_trees_close(found, expected)


def _transformed(run, cell):
    """Per-example gradients, nested `vmap`, second derivatives, and a call in `scan` and `checkpoint`."""

    def loss(cell, xs):
        return sum((a**2).sum() for a in run(cell, INIT[0], xs))

    def body(total, xs):
        return total + jax.checkpoint(loss)(cell, xs), None

    def hessian_product(cell):
        return jax.tree.reduce(jnp.add, jax.tree.map(lambda g: (g**2).sum(), jax.grad(loss)(cell, XS[0])))

    nested = jnp.stack([XS, -XS])
    return (
        jax.vmap(jax.grad(loss), (None, 0))(cell, XS),
        jax.vmap(jax.vmap(lambda xs: run(cell, INIT[0], xs)[1], 1, 1))(nested.swapaxes(1, 2)),
        jax.grad(hessian_product)(cell),
        jax.grad(lambda xs: jax.lax.scan(body, 0.0, xs)[0])(XS),
    )


def test_transformations():
    cell = _cell()
    found, expected = (jax.jit(_transformed, static_argnums=0)(run, cell) for run in (scan_gru, _scan))
    assert_trees_close(found, expected)
    with jaxgrad.forward_mode():
        tangents = [
            jax.jvp(lambda xs, run=run: run(cell, INIT[0], xs), (XS[0],), (XS[1],)) for run in (scan_gru, _scan)
        ]
    assert_trees_close(*tangents)


def test_steps_of_a_rollout():
    """A rollout calls the cell; one call computes it again."""
    cell, h, states = _cell(), INIT[0], []
    for x in XS[0]:
        h = cell(x, h)
        states.append(h)
    assert_trees_close(scan_gru(cell, INIT[0], XS[0]), (h, jnp.stack(states)))


def test_dtypes():
    """The dtypes are promoted as in the cell."""
    cell = _cell(dtype=jnp.bfloat16)
    for dtype in jnp.bfloat16, jnp.float32:
        args = cell, INIT[0].astype(dtype), XS[0].astype(dtype)
        assert_trees_close(scan_gru(*args), _scan(*args), 4 * float(jnp.finfo(dtype).eps))


def test_errors():
    with pytest.raises(
        TypeError, match=r"scan_gru: cell must be an equinox.nn.GRUCell, got LSTMCell; use jax.lax.scan"
    ):
        scan_gru(eqx.nn.LSTMCell(I, H, key=jax.random.key(0)), INIT[0], XS[0])
    with pytest.raises(ValueError, match=r"init must have the shape \[\*batch, H\] = \(4,\), got \(3,\)"):
        scan_gru(_cell(), INIT[0, :3], XS[0])
    with pytest.raises(ValueError, match=r"xs must have the shape \[T, \*batch, I\] with I = 5, got \(6, 4\)"):
        scan_gru(_cell(), INIT[0], XS[0, :, :4])
    with pytest.raises(ValueError, match=r"reset must have the shape \[T, \*batch\] = \(6,\), got \(3,\)"):
        scan_gru(_cell(), INIT[0], XS[0], reset=jnp.zeros(3, bool))
