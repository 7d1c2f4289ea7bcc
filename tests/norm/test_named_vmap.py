"""Statistics over a named axis of `vmap`, against the whole batch in float64, with gradients in both orders."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import BATCH_NORM, CPU_KERNEL
from batch_norm_references import EPSILON, Results, plain_training, spread, training
from jax import lax

import jaxgrad

pytestmark = pytest.mark.jax_version

BACKENDS = BATCH_NORM
N, C = 4, 3  # examples, channels
SETTINGS = {"feature_axis": 0, "epsilon": EPSILON}
RELU = {**SETTINGS, "activation": "relu"}


def _inputs(*spatial: int) -> tuple[np.ndarray, ...]:
    """A batch of examples with the features first, scale, bias and residual."""
    x, residual = 1.5 * np.random.default_rng(0).standard_normal((2, N, C, *spatial)) + 0.7
    return x, np.linspace(0.5, 2, C), np.linspace(-1, 1, C), residual


def _whole(x, scale, bias, residual=None, **settings):
    """The reference: one call for the whole batch."""
    return plain_training(x, scale, bias, residual, **{**settings, "feature_axis": 1})


def _loss(results: Any) -> jax.Array:
    y, mean, var = results
    return jnp.vdot(jnp.cos(jnp.arange(y.size)).reshape(y.shape), y) + jnp.sum(mean**3) + jnp.sum(var**2)


def _gradients(call: Callable[..., Any], *inputs: Any) -> Any:
    """The results and all gradients."""

    def loss(*inputs):
        results = call(*inputs)
        return _loss(results), results

    return jax.value_and_grad(loss, tuple(range(len(inputs))), has_aux=True)(*inputs)


def _close(found, expected, tolerance=1e-9):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), found, expected)


def _mapped(call, x_axis=0, **settings):
    """The call for one example under `vmap`. `out_axes` require that the statistics are not mapped."""
    one = partial(call, axis_name="batch", **settings)

    def run(x, scale, bias, residual=None):
        in_axes = (x_axis, None, None, None if residual is None else 0)
        batched = jax.vmap(
            lambda x, s, b, r: tuple(one(x, s, b, residual=r)), in_axes, (0, None, None), axis_name="batch"
        )
        return Results(*batched(x, scale, bias, residual))

    return run


def _check(mapped, inputs, put=lambda arrays: arrays, **settings):
    found = jax.jit(partial(_gradients, mapped))(*put(inputs))
    _close(found, jax.jit(partial(_gradients, partial(_whole, **settings)))(*inputs))


def test_an_example_of_channels_alone(backend):
    _check(_mapped(training(backend), **SETTINGS), _inputs()[:3], backend.put, **SETTINGS)


@pytest.mark.parametrize("x_axis", [0, 1, 3])
def test_with_residual_and_relu(backend, x_axis):
    mapped = _mapped(training(backend), x_axis, **RELU)
    moved = lambda x, *rest: mapped(jnp.moveaxis(x, 0, x_axis), *rest)  # noqa: E731
    _check(moved, _inputs(2, 5), backend.put, **RELU)


def _in_scan(call):
    def run(*inputs):
        step = lambda _, x: (None, call(x, *inputs[1:]))  # noqa: E731
        results = lax.scan(step, None, jnp.stack([0 * inputs[0], inputs[0]]))[1]
        return Results(*(r[1] for r in results))

    return run


@pytest.mark.parametrize("inside", [jax.jit, jax.checkpoint, _in_scan])
def test_transformations_inside_the_vmap(inside):
    inputs = _inputs(5)

    def mapped(*inputs):
        call = partial(training(CPU_KERNEL), axis_name="batch", **RELU)
        one = inside(lambda x, s, b, r: call(x, s, b, residual=r))
        return jax.vmap(one, (0, None, None, 0), Results(0, None, None), axis_name="batch")(*inputs)

    _check(mapped, inputs, **RELU)


def _formula(x, scale, bias, residual=None, *, axis_name):
    """The textbook formula with JAX's collectives, without an activation."""
    others = tuple(range(1, x.ndim))
    mean = lax.pmean(x.mean(others), axis_name)
    var = lax.pmean(jnp.mean((x - spread(mean, x.ndim, 0)) ** 2, others), axis_name)
    scale, bias, mean_, var_ = (spread(a, x.ndim, 0) for a in (scale, bias, mean, var))
    y = scale * (x - mean_) / jnp.sqrt(var_ + EPSILON) + bias
    return y if residual is None else y + residual, mean, var


@pytest.mark.parametrize("penalty", [False, True])
def test_gradients_inside_the_vmap(penalty):
    """Each example differentiates its own loss. With a penalty, the gradients are differentiated outside."""
    x, scale, bias, residual = _inputs(5)

    def run(call, x, scale, bias):
        def one(x, scale, bias, residual):
            return jax.grad(lambda *a: _loss(call(*a, residual)), (0, 1, 2))(x, scale, bias)

        return jax.vmap(one, (0, None, None, 0), axis_name="batch")(x, scale, bias, residual)

    def both(call):
        function = partial(run, call)
        if penalty:
            function = jax.grad(lambda *a: sum(jnp.sum(g**2) for g in run(call, *a)), (0, 1, 2))
        return jax.jit(function)(x, scale, bias)

    ours = partial(jaxgrad.batch_norm_training, axis_name="batch", **SETTINGS)
    found = both(lambda x, s, b, r: ours(x, s, b, residual=r))
    _close(found, both(partial(_formula, axis_name="batch")), 1e-8)


def test_higher_derivatives_and_forward_mode():
    inputs, directions = _inputs(5), tuple(map(np.sin, _inputs(5)))
    mapped, whole = _mapped(training(CPU_KERNEL), **RELU), partial(_whole, **RELU)
    loss = {name: lambda *a, call=call: _loss(call(*a)) for name, call in (("ours", mapped), ("expected", whole))}

    def penalty(f, *a):
        return sum(jnp.sum(g**2) for g in jax.grad(f, (0, 1))(*a))

    second = {name: jax.jit(jax.grad(partial(penalty, f), (0, 1, 2, 3)))(*inputs) for name, f in loss.items()}
    _close(second["ours"], second["expected"])
    tangents = {name: jax.jit(partial(jaxgrad.jvp, f))(inputs, directions) for name, f in loss.items()}
    _close(tangents["ours"], tangents["expected"])


@pytest.mark.parametrize("names", [("batch",), ("group",), ("batch", "group"), ("group", "batch")], ids="-".join)
def test_nested_vmap(names):
    """Two mapped axes, of which some are named: the others have statistics of their own."""
    x, scale, bias, _ = _inputs(5)
    x = np.stack([x, 2 * x + 1])  # [group, batch, C, 5]
    call = partial(training(CPU_KERNEL), axis_name=names, **SETTINGS)

    def ours(x, scale, bias):
        inner = jax.vmap(call, (0, None, None), axis_name="batch")
        return jax.vmap(inner, (0, None, None), axis_name="group")(x, scale, bias)

    def expected(x, scale, bias):
        axes = (*(i for i, name in enumerate(("group", "batch")) if name in names), 3)
        mean = x.mean(axes, keepdims=True)
        var = jnp.mean((x - mean) ** 2, axes, keepdims=True)
        y = scale[:, None] * (x - mean) / jnp.sqrt(var + EPSILON) + bias[:, None]
        return Results(y, *(jnp.broadcast_to(s, (2, N, C, 1))[..., 0] for s in (mean, var)))

    inputs = x, scale, bias
    _close(jax.jit(partial(_gradients, ours))(*inputs), jax.jit(partial(_gradients, expected))(*inputs))


@pytest.mark.parametrize("in_axes", [(0, 0, None), (0, None, 0), (None, 0, 0), (None, None, None)], ids=str)
def test_which_arguments_are_mapped(in_axes):
    arrays = tuple(np.stack([a + 0.1 * i for i in range(N)]) for a in (_inputs(5)[0][0], *_inputs()[1:3]))
    arrays = tuple(a[0] if axis is None else a for a, axis in zip(arrays, in_axes, strict=True))

    def run(call):
        # Without axis_size, JAX refuses to map nothing.
        mapped = jax.vmap(call, in_axes, axis_name="batch", axis_size=N)
        return jax.jit(partial(_gradients, lambda *a: mapped(*a)))(*arrays)

    ours = partial(training(CPU_KERNEL), axis_name="batch", **SETTINGS)
    _close(run(ours), run(lambda *a: Results(*_formula(*a, axis_name="batch"))))


def test_one_call_of_each_kernel():
    inputs = tuple(a.astype(np.float32) for a in _inputs(5))
    mapped = _mapped(partial(jaxgrad.batch_norm_training, implementation="cpu"), **RELU)
    text = jax.jit(partial(_gradients, mapped)).lower(*inputs).as_text()
    assert text.count("stablehlo.custom_call @jaxgrad_cpu_norm") == 2
    assert "while" not in text
