"""The backward pass of the CUDA backend around its kernel, which XLA emulates. No GPU is needed."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gru_cases import Case, make_inputs

from jaxgrad._src.choice.candidates import XLA
from jaxgrad._src.gru import cuda, xla
from jaxgrad._src.gru.params import GruParams

EXAMPLES = 4


def _kernel(params, r, sequence_lens, initial_h, reset, reset_h, y, gates, dy, dy_h):
    """The recurrence of one group: dgates and recurrent_dgates [T, B, D, 3, H], dh0 and dreset_h [D, B, H]."""
    T, D, B, H = y.shape
    x, w = jnp.zeros((T, B, 3 * H), y.dtype), jnp.broadcast_to(jnp.eye(3 * H, dtype=y.dtype), (D, 3 * H, 3 * H))
    needs_grad = (True, False, False, False, True, True)
    arrays = sequence_lens, initial_h, reset, reset_h, y, gates, dy, dy_h
    dgates = []
    for d, direction in enumerate(("forward", "reverse") if D == 2 else (params.direction,)):
        one = dataclasses.replace(params, direction=direction)
        states = (None if a is None else a[d : d + 1] for a in (initial_h, reset_h, dy_h))
        of_steps = (a[:, d : d + 1] for a in (y, gates, dy))
        (h, h_reset, dh), (y_d, gates_d, dy_d) = states, of_steps
        others = sequence_lens, h, reset, h_reset, y_d, gates_d, dy_d, dh
        # With the identity as input weights, the gradient of x is that of the pre-activations.
        dgates.append(xla.backward(one, x, w[d : d + 1], r[d : d + 1], *others, needs_grad=needs_grad).x)
    both = xla.backward(params, x, w, r, *arrays, needs_grad=needs_grad)
    found = jnp.stack(dgates, 2).reshape(T, B, D, 3, H)
    r_gate = jnp.swapaxes(gates[..., H : 2 * H], 1, 2)
    if params.clip is not None:  # where it bounded the pre-activation, the gate is saved as +2 or -2
        r_gate = jnp.where(jnp.abs(r_gate) > 1.5, jax.nn.sigmoid(jnp.sign(r_gate) * params.clip), r_gate)
    recurrent = found.at[:, :, :, 2].multiply(r_gate)
    return found, recurrent, both.initial_h, both.reset_h


@pytest.fixture
def emulated(monkeypatch):
    def install(params):
        def ffi_call(name, results, operands, workspace, **_):
            assert name == "jaxgrad_cuda_gru_backward"
            assert operands[0].shape[0] == 1, "examples are rows of one recurrence"
            given = (None if operand.size == 0 else operand for operand in operands)
            found = list(jax.vmap(partial(_kernel, params))(*given))
            if results[1].shape == (0,):
                found[1] = jnp.zeros((0,), results[1].dtype)
            assert [array.shape for array in found] == [result.shape for result in results]
            return found

        monkeypatch.setattr(cuda, "ffi_call", ffi_call)
        monkeypatch.setattr(cuda, "_workspace", lambda *_: 0)

    return install


@pytest.mark.each_value
@pytest.mark.parametrize("many_units", [0, 1 << 13])  # the kernel writes recurrent_dgates, or not
@pytest.mark.parametrize(
    "case",
    [
        Case(T=5, B=3, I=4, H=6, direction="bidirectional", linear_before_reset=True),
        Case(T=4, B=2, I=3, H=5, direction="reverse", linear_before_reset=True, clip=0.7),
        Case(T=5, B=2, I=3, H=4, direction="reverse", clip=0.7),
        Case(T=0, B=2, I=3, H=4).bare(),
    ],
    ids=str,
)
def test_examples_that_share_weights(emulated, monkeypatch, case, many_units):
    monkeypatch.setattr(cuda, "_MANY_UNITS", many_units)
    features = case.sequence_lens, case.reset, case.reset and case.reset_h
    params = GruParams(case.direction, case.linear_before_reset, case.clip, "highest", *features, False, XLA, XLA)
    emulated(params)
    drawn = [make_inputs(case.replace(seed=seed)) for seed in range(EXAMPLES)]
    inputs, (dy, dy_h) = jax.tree.map(lambda *arrays: jnp.stack(arrays), *drawn)
    w, r, b = (None if a is None else a[0] for a in (inputs.w, inputs.r, inputs.b))
    others = inputs.sequence_lens, inputs.initial_h, inputs.reset, inputs.reset_h
    forward = jax.vmap(partial(xla.forward, params, save_gates=True), (0, None, None, None, *[0] * 4))
    on_kernel, on_xla = (
        partial(backward, params, needs_grad=(True,) * 6) for backward in (cuda.CudaBackend().backward, xla.backward)
    )

    @jax.jit
    def gradients(x, w, r, b, others, dy, dy_h):
        y, _, gates = forward(x, w, r, b, *others)
        operands = *others, y, gates, dy, dy_h
        one_by_one = jax.vmap(on_xla, (0, None, None, *[0] * 8))
        return on_kernel(x, w[None], r[None], *operands), one_by_one(x, w, r, *operands)

    found, expected = gradients(inputs.x, w, r, b, others, dy, dy_h)
    for name in found._fields:
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=0, atol=1e-12, err_msg=name)
