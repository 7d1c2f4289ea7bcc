"""`jaxgrad.nn.haiku.dynamic_unroll` against `hk.dynamic_unroll`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from converted_gru import B, H, I, T, assert_same_bits, assert_trees_close, normal, random_like
from rnn_cases import program_of, values_and_gradients

pytestmark = pytest.mark.jax_version

hk = pytest.importorskip("haiku")

from jaxgrad.nn.haiku import dynamic_unroll  # noqa: E402

X, INIT = jnp.asarray(normal(T, B, I)), jnp.asarray(normal(B, H))
RESET = jnp.asarray(np.random.default_rng(0).random((T, B)) < 0.4)


def _transform(function, with_resets=False, **options):
    def run(x, state, reset):
        core = hk.GRU(H)
        x, core = ((x, reset), hk.ResetCore(core)) if with_resets else (x, core)
        return function(core, x, state, **options)

    return hk.without_apply_rng(hk.transform(run))


def _compare(args=(X, INIT, RESET), tolerance=1e-11, **options):
    ours, theirs = (_transform(unroll, **options) for unroll in (dynamic_unroll, hk.dynamic_unroll))
    params = theirs.init(jax.random.key(0), *args)
    assert_same_bits(ours.init(jax.random.key(0), *args), params)
    params = random_like(params)
    x, state, reset = args
    runs = [lambda params, x, state, layer=layer: layer.apply(params, x, state, reset) for layer in (ours, theirs)]
    found, expected = (values_and_gradients(run, params, x, state) for run in runs)
    assert_trees_close(found, expected, tolerance)
    assert ["jaxgrad" in program_of(run, params, x, state) for run in runs] == [True, False]


@pytest.mark.each_value
@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"return_all_states": True, "unroll": 2}], ids=str)
@pytest.mark.parametrize("with_resets", [False, True])
def test_values_and_gradients(options, with_resets):
    _compare(with_resets=with_resets, **options)


def test_layouts():
    _compare((X.swapaxes(0, 1), INIT, RESET.T), time_major=False, with_resets=True)
    _compare((X[:, 0], INIT[0], RESET[:, 0]), with_resets=True)


def test_vmap():
    """An ensemble: parameters are mapped."""
    ours, theirs = (_transform(unroll) for unroll in (dynamic_unroll, hk.dynamic_unroll))
    keys = jax.random.split(jax.random.key(0), 3)
    params = jax.vmap(theirs.init, (0, None, None, None))(keys, X, INIT, RESET)
    found, expected = (jax.vmap(layer.apply, (0, None, None, None))(params, X, INIT, RESET) for layer in (ours, theirs))
    assert_trees_close(found, expected)


def test_mixed_precision():
    """Under a policy the parameters stay in float32, and the arithmetic is bfloat16."""
    jmp = pytest.importorskip("jmp")
    policy = jmp.get_policy("params=float32,compute=bfloat16,output=float32")
    hk.mixed_precision.set_policy(hk.GRU, policy)
    try:
        args = X.astype(jnp.float32), INIT.astype(jnp.float32), RESET
        _compare(args, tolerance=4 * 2.0**-7, with_resets=True)
        assert f"bf16[{T},{B},{I}]" in program_of(_apply_with_random_parameters(args), *args)
    finally:
        hk.mixed_precision.clear_policy(hk.GRU)


def _apply_with_random_parameters(args):
    layer = _transform(dynamic_unroll)
    params = layer.init(jax.random.key(0), *args)
    return lambda *args: layer.apply(params, *args)


def test_steps_of_a_rollout():
    """A rollout calls the core with the same parameters; one call computes it again."""
    step = hk.without_apply_rng(hk.transform(lambda x, state: hk.GRU(H)(x, state)))
    params = random_like(step.init(jax.random.key(0), X[0], INIT))
    state, outputs = INIT, []
    for x, reset in zip(X, RESET, strict=True):
        y, state = step.apply(params, x, jnp.where(reset[:, None], 0, state))
        outputs.append(y)
    found = _transform(dynamic_unroll, with_resets=True).apply(params, X, INIT, RESET)
    assert_trees_close(found, (jnp.stack(outputs), state))


def test_errors():
    def run(core, x=X, state=INIT, **options):
        return hk.transform(lambda: dynamic_unroll(core(), x, state, **options)).init(jax.random.key(0))

    with pytest.raises(TypeError, match=r"core must be an hk.GRU or an hk.ResetCore of one, got LSTM; use hk.dynamic"):
        run(lambda: hk.LSTM(H))
    with pytest.raises(TypeError, match="got a ResetCore of LSTM"):
        run(lambda: hk.ResetCore(hk.LSTM(H)), (X, RESET))
    with pytest.raises(ValueError, match=r"initial_state must have the shape \[B, H\] = \(3, 4\), got \(3, 5\)"):
        run(lambda: hk.GRU(H), state=jnp.zeros((B, H + 1)))
    with pytest.raises(ValueError, match=r"the resets in input_sequence must have the shape \[T, B\] = \(6, 3\), got"):
        run(lambda: hk.ResetCore(hk.GRU(H)), (X, RESET.T))
    with pytest.raises(ValueError, match="time_major must be True for an input_sequence without a batch"):
        run(lambda: hk.GRU(H), X[0], INIT[0], time_major=False)
