"""`remat_every`: the results are those without it, and fewer residuals are kept."""

from __future__ import annotations

import gru_references
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import CPU_KERNEL, GRU
from gru_cases import Case, fill_padding, make_inputs
from gru_running import DIFFERENTIABLE, values_and_gradients
from thorough import thorough_after
from tolerances import assert_results_close

import jaxgrad

BACKENDS = GRU

SETTINGS = [
    Case(T=7, B=5, I=3, H=9, direction="forward"),
    Case(T=7, B=4, I=3, H=4, direction="reverse", linear_before_reset=True),
    Case(T=7, B=5, I=3, H=5, direction="bidirectional", clip=0.9),
    Case(T=7, B=2, I=3, H=5, direction="bidirectional").bare(),
]


@pytest.mark.parametrize("every", thorough_after(2, [2, 7, 1, 3, 50]))
@pytest.mark.parametrize("case", SETTINGS, ids=str)
def test_values_and_gradients(backend, case, every):
    inputs, cotangents = make_inputs(case, backend.widest)
    settings = {**case.settings, "remat_every": every}
    actual = values_and_gradients(backend, fill_padding(inputs, np.nan), cotangents, settings)
    expected = gru_references.values_and_gradients(inputs, cotangents, **case.settings)
    assert_results_close(actual, expected, dtype=backend.widest, terms=case.terms, backend=backend)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weight_gradients_are_not_rounded_after_every_chunk(dtype):
    """Sixty sums in a 16-bit type would lose the tolerance, which is above the rounding of the result."""
    case = Case(T=120, B=8, I=3, H=5, linear_before_reset=True)
    inputs, cotangents = make_inputs(case, dtype)
    actual = values_and_gradients(CPU_KERNEL, inputs, cotangents, {**case.settings, "remat_every": 2})
    expected = gru_references.values_and_gradients(inputs, cotangents, **case.settings)
    for name in ("w", "r", "b"):
        found, desired = (np.asarray(getattr(g, name), np.float64) for g in (actual[2], expected[2]))
        error = np.abs(found - desired).max() / np.abs(desired).max()
        assert error < jnp.finfo(dtype).eps, (name, error)


def test_calls_outside_jit_are_compiled_once():
    case = Case(T=7, B=2, I=3, H=5, direction="bidirectional")
    inputs = make_inputs(case, "float32")[0]

    def gradient():
        return jax.grad(lambda x: jnp.sum(CPU_KERNEL.gru(*inputs._replace(x=x), **case.settings, remat_every=2)[0]))(
            CPU_KERNEL.put(inputs.x)
        )

    compiled = []

    def listen(event, seconds, **_):
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    gradient()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        gradient()
        assert not compiled
        jax.jit(lambda x: x + 1)(1)
        assert compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_memory():
    """The temporaries of a long sequence shrink to about the states and one chunk."""
    case = Case(T=2048, B=4, I=8, H=32, sequence_lens=False, reset=False)
    inputs = CPU_KERNEL.put(make_inputs(case, "float32")[0])

    def temporaries(**settings):
        def loss(x, w, r):
            return jnp.sum(CPU_KERNEL.gru(*inputs._replace(x=x, w=w, r=r), **settings)[1])

        compiled = jax.jit(jax.grad(loss, (1, 2))).lower(inputs.x, inputs.w, inputs.r).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    states = case.T * case.B * case.H * 4
    assert temporaries() > 4 * states
    assert temporaries(remat_every=64) < states


@pytest.mark.parametrize("H", [40, 300])  # on a GPU blocks and teams
def test_a_sequence_of_20_000_steps(backend, H):
    """The gradients are those without `remat_every`, from a fraction of the memory."""
    case = Case(T=20_000, B=2, I=4, H=H, sequence_lens=False, reset=False)
    inputs = backend.put(make_inputs(case, "float32")[0])
    found, temporaries = {}, {}
    for every in (None, 200):

        def loss(x, w, r, every=every):
            y, y_h = backend.gru(*inputs._replace(x=x, w=w, r=r), remat_every=every)
            return jnp.sum(jnp.sin(y[::100])) + jnp.sum(y_h)

        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(inputs.x, inputs.w, inputs.r).compile()
        temporaries[every] = compiled.memory_analysis().temp_size_in_bytes
        found[every] = compiled(inputs.x, inputs.w, inputs.r)
    for one, other in zip(found[200], found[None], strict=True):
        scale = float(jnp.abs(other).max())
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-4 * scale)
    states = case.T * case.B * case.H * 4
    assert temporaries[200] < temporaries[None] - 2 * states


@pytest.mark.parametrize(("steps", "barriers"), [(8, False), (9, True)])
def test_the_loop_has_no_barriers(steps, barriers):
    """Only the chunk after the loop needs them, or XLA would merge its two computations."""
    inputs = make_inputs(Case(T=steps, B=3, I=2, H=5).bare(), "float32")[0]

    def loss(r):
        return jnp.sum(CPU_KERNEL.gru(*inputs._replace(r=r), remat_every=2)[1])

    assert ("optimization_barrier" in jax.jit(jax.grad(loss)).lower(inputs.r).as_text()) == barriers


def test_residuals():
    """Of all steps, only the states between the chunks are kept."""
    case = Case(T=64, B=3, I=2, H=5).bare()
    inputs = make_inputs(case, "float32")[0]

    def kept(**settings):
        _, pullback = jax.vjp(lambda r: CPU_KERNEL.gru(*inputs._replace(r=r), **settings)[1], jnp.asarray(inputs.r))
        return {leaf.shape for leaf in jax.tree.leaves(pullback)}

    assert (64, 1, 3, 15) in kept()
    assert (8, 1, 3, 5) in kept(remat_every=8)
    # x, in chunks, is smaller than the states.
    assert max(map(np.prod, kept(remat_every=8))) < case.T * case.B * case.H


def test_under_vmap_and_second_derivatives(backend):
    case = Case(T=5, B=2, I=3, H=4)
    inputs = make_inputs(case, backend.widest)[0]
    put = backend.put(inputs)

    def penalty(r, **settings):
        def loss(r):
            return sum(jnp.sum(out**2) for out in backend.gru(*put._replace(r=r), **settings))

        return jnp.sum(jax.grad(loss)(r) ** 2)

    rs = backend.put(np.stack([inputs.r, -inputs.r]))
    found, expected = (
        jax.jit(jax.vmap(jax.grad(lambda r, s=settings: penalty(r, **s))))(rs) for settings in ({"remat_every": 2}, {})
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=backend.atol(1e-11))


def test_forward_mode():
    case = Case(T=5, B=2, I=3, H=4, direction="reverse")
    inputs = CPU_KERNEL.put(make_inputs(case, "float64")[0])
    given = {name: getattr(inputs, name) for name in DIFFERENTIABLE}

    def tangents(**settings):
        return jaxgrad.jvp(
            lambda given: CPU_KERNEL.gru(*inputs._replace(**given), **case.settings, **settings), (given,), (given,)
        )[1]

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12), tangents(remat_every=2), tangents())


def test_lengths_out_of_range_are_errors_on_the_cpu():
    inputs, cotangents = make_inputs(Case(), "float32")
    for wrong in (9, -1):
        inputs.sequence_lens[1] = wrong
        with pytest.raises(jax.errors.JaxRuntimeError, match="sequence_lens"):
            values_and_gradients(CPU_KERNEL, inputs, cotangents, {"remat_every": 2})


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (0, ValueError, "remat_every must be positive, got 0"),
        (-3, ValueError, "remat_every must be positive, got -3"),
        (True, TypeError, "remat_every must be an integer or None, got bool"),
        (2.0, TypeError, "remat_every must be an integer or None, got float"),
    ],
)
def test_errors(value, error, message):
    with pytest.raises(error, match=f"^jaxgrad.gru: {message}"):
        CPU_KERNEL.gru(*make_inputs(Case(), "float32")[0], remat_every=value)


def test_chunks_need_a_known_number_of_steps():
    (T,) = jax.export.symbolic_shape("T")
    x = jax.ShapeDtypeStruct((T, 2, 3), "float32")
    w, r = (jnp.ones((1, 12, size), "float32") for size in (3, 4))
    call = jax.jit(lambda x: jaxgrad.gru(x, w, r, remat_every=2))
    with pytest.raises(ValueError, match=r"remat_every=2 requires a known number of steps, got T = T"):
        jax.export.export(call, platforms=["cpu"])(x)
