"""The GRU inside control flow and transformations of JAX, against a plain call or the reference."""

from __future__ import annotations

import gru_references
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import GRU, XLA
from gru_cases import Case, make_inputs
from gru_running import DIFFERENTIABLE
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxgrad

pytestmark = pytest.mark.jax_version

BACKENDS = GRU

CASE = Case(T=4, B=3, I=5, H=5, linear_before_reset=True)  # I = H: layers can be stacked
POLICIES = {
    "none": None,
    "everything": jax.checkpoint_policies.everything_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
}


def _inputs(backend, dtype=None):
    return backend.put(make_inputs(CASE, dtype or backend.widest)[0])


def _compare(backend, found, expected, atol=None):
    atol = atol or backend.atol(1e-12)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol), found, expected)


def _gradients(outputs, inputs):
    """Gradients, with respect to x and all weights, of a loss of `outputs(inputs)`, without `jit`."""
    differentiable = {name: getattr(inputs, name) for name in DIFFERENTIABLE}

    def loss(differentiable):
        return sum(jnp.sum(jnp.sin(out)) for out in jax.tree.leaves(outputs(inputs._replace(**differentiable))))

    return jax.grad(loss), differentiable


def test_results_match_with_and_without_jit(backend):
    inputs = _inputs(backend)
    gradient, differentiable = _gradients(lambda inputs: backend.gru(*inputs, **CASE.settings), inputs)
    _compare(backend, gradient(differentiable), jax.jit(gradient)(differentiable))
    _compare(backend, backend.gru(*inputs), jax.jit(backend.gru)(*inputs))


def test_grad_of_jit(backend):
    inputs = _inputs(backend)
    inner, differentiable = _gradients(jax.jit(lambda inputs: backend.gru(*inputs, **CASE.settings)), inputs)
    plain, _ = _gradients(
        lambda inputs: gru_references.forward(*inputs, **CASE.settings), make_inputs(CASE, backend.widest)[0]
    )
    _compare(backend, inner(differentiable), plain(differentiable))


@pytest.mark.thorough_on_xla
@pytest.mark.parametrize("policy", POLICIES)
def test_checkpoint(backend, policy):
    inputs = _inputs(backend)

    def layer(inputs):
        return backend.gru(*inputs, **CASE.settings)

    rematerialized, differentiable = _gradients(jax.checkpoint(layer, policy=POLICIES[policy]), inputs)
    plain, _ = _gradients(layer, inputs)
    _compare(backend, jax.jit(rematerialized)(differentiable), jax.jit(plain)(differentiable))


def test_checkpoint_with_a_name(backend):
    inputs = _inputs(backend)
    policy = jax.checkpoint_policies.save_only_these_names("hidden")

    def layer(inputs):
        y, _ = backend.gru(*inputs, **CASE.settings)
        y = checkpoint_name(y, "hidden")
        return backend.gru(*inputs._replace(x=y[:, 0]), **CASE.settings)

    rematerialized, differentiable = _gradients(jax.checkpoint(layer, policy=policy), inputs)
    plain, _ = _gradients(layer, inputs)
    _compare(backend, jax.jit(rematerialized)(differentiable), jax.jit(plain)(differentiable))


def _stack_by_scan(gru, inputs):
    """Three layers with the same weights, by `lax.scan` over layers, whose carry is the sequence and the state."""

    def layer(carry, scale):
        x, h = carry
        y, h = gru(*inputs._replace(x=scale * x, initial_h=h), **CASE.settings)
        return (y[:, 0], h), jnp.sum(h)

    return lax.scan(layer, (inputs.x, inputs.initial_h), jnp.array([1.0, 0.5, 2.0], inputs.x.dtype))


def _stack_with_own_weights(gru, inputs):
    """Two layers with their own weights, by `lax.scan`."""

    def layer(x, w):
        y, _ = gru(x, w, *inputs[2:], **CASE.settings)
        return y[:, 0], None

    return lax.scan(layer, inputs.x, jnp.stack([inputs.w, -inputs.w]))


def _either_branch(gru, inputs):
    """`lax.cond` between two directions, one taken and one not."""

    def branch(direction):
        return lambda inputs: gru(*inputs, **{**CASE.settings, "direction": direction})

    return [
        lax.cond(jnp.sum(sign * inputs.x) > 0, branch("forward"), branch("reverse"), inputs) for sign in (1.0, -1.0)
    ]


@pytest.mark.thorough_on_xla
@pytest.mark.parametrize("model", [_stack_by_scan, _stack_with_own_weights, _either_branch])
def test_control_flow_with_gradients(backend, model):
    inputs = _inputs(backend)
    found, differentiable = _gradients(lambda inputs: model(backend.gru, inputs), inputs)
    reference, _ = _gradients(
        lambda inputs: model(gru_references.forward, inputs), make_inputs(CASE, backend.widest)[0]
    )
    _compare(backend, jax.jit(found)(differentiable), jax.jit(reference)(jax.tree.map(np.asarray, differentiable)))


def test_while_loop(backend):
    inputs = _inputs(backend)

    def repeat(gru, inputs):
        def body(carry):
            count, h = carry
            return count + 1, gru(*inputs._replace(initial_h=h), **CASE.settings)[1]

        return lax.while_loop(lambda carry: carry[0] < 3, body, (0, inputs.initial_h))[1]

    found = jax.jit(lambda inputs: repeat(backend.gru, inputs))(inputs)
    _compare(backend, found, repeat(gru_references.forward, make_inputs(CASE, backend.widest)[0]))


def test_eval_shape_and_weak_types(backend):
    inputs = make_inputs(CASE, "bfloat16")[0]
    shapes = jax.eval_shape(lambda inputs: backend.gru(*inputs, direction="reverse"), inputs)
    assert [(out.shape, out.dtype.name) for out in shapes] == [((4, 1, 3, 5), "bfloat16"), ((1, 3, 5), "bfloat16")]
    assert not any(out.weak_type for out in shapes)


def test_donated_buffers(backend):
    inputs = _inputs(backend, "float32")
    expected = jax.jit(backend.gru)(*inputs)
    copies = backend.put(make_inputs(CASE, "float32")[0])
    # y has the size of x, and y_h that of initial_h: XLA may write each result over its input.
    found = jax.jit(backend.gru, donate_argnums=(0, 5))(*copies)
    assert copies.x.is_deleted()
    _compare(backend, found, expected, atol=1e-6)


def test_a_training_step_with_donated_weights(backend):
    inputs = _inputs(backend, "float32")

    def step(w, r, inputs):
        def loss(w, r):
            return jnp.sum(backend.gru(*inputs._replace(w=w, r=r))[0] ** 2)

        gradients = jax.grad(loss, argnums=(0, 1))(w, r)
        return w - 0.1 * gradients[0], r - 0.1 * gradients[1]

    expected = inputs.w, inputs.r
    donated = backend.put((np.array(inputs.w), np.array(inputs.r)))
    plain, donating = jax.jit(step), jax.jit(step, donate_argnums=(0, 1))
    for _ in range(3):
        expected, donated = plain(*expected, inputs), donating(*donated, inputs)
    _compare(backend, donated, expected, atol=1e-6)


def test_a_pullback_may_be_called_again(backend):
    """The residuals of a pullback are not consumed by a call."""
    inputs, cotangents = make_inputs(CASE, backend.widest)
    _, pullback = jax.vjp(lambda x: backend.gru(*backend.put(inputs)._replace(x=x)), backend.put(inputs.x))
    (first,), (second,) = pullback(tuple(cotangents)), pullback(tuple(2 * c for c in cotangents))
    _compare(backend, second, 2 * first)


def test_symbolic_number_of_steps():
    """A program may be exported for every number of steps and rows, with its gradients. It runs on XLA."""
    T, B = jax.export.symbolic_shape("T, B")
    case = Case(T=5, B=3, I=4, H=3, direction="bidirectional")
    inputs = make_inputs(case, "float64")[0]
    x, lens, h, reset = inputs.x, inputs.sequence_lens, inputs.initial_h, inputs.reset

    def gradients(x, sequence_lens, initial_h, reset):
        arrays = inputs._replace(x=x, sequence_lens=sequence_lens, initial_h=initial_h, reset=reset)
        arrays = jax.tree.map(jnp.asarray, arrays)

        def loss(x, w):
            settings = {"direction": case.direction}
            y, y_h = jaxgrad.gru(**arrays._replace(x=x, w=w, reset_h=2 * initial_h)._asdict(), **settings)
            return jnp.sum(y**2) + jnp.sum(y_h**3)

        return jax.value_and_grad(loss, (0, 1))(arrays.x, arrays.w)

    symbolic = (
        jax.ShapeDtypeStruct((T, B, 4), x.dtype),
        jax.ShapeDtypeStruct((B,), lens.dtype),
        jax.ShapeDtypeStruct((2, B, 3), h.dtype),
        jax.ShapeDtypeStruct((T, B), reset.dtype),
    )
    exported = jax.export.export(jax.jit(gradients), platforms=["cpu"])(*symbolic)
    with jax.default_device(jax.devices("cpu")[0]):
        for steps in (5, 2):
            arrays = x[:steps], np.minimum(lens, steps), h, reset[:steps]
            _compare(XLA, exported.call(*arrays), jax.jit(gradients)(*arrays))
