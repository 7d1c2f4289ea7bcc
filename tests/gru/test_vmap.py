"""`vmap` over every subset of the arguments, against a Python loop; `vmap` of `grad` and `grad` of `vmap`."""

from __future__ import annotations

import dataclasses
import itertools
import re
from functools import partial

import gru_references
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import CPU_KERNEL, CUDA, GRU, XLA, XLA_ON_GPU
from gru_cases import OPTIONAL, Case, Inputs, lengths, make_inputs
from gru_running import DIFFERENTIABLE
from thorough import thorough_after

BACKENDS = GRU

NAMES = Inputs._fields
SUBSETS = [names for n in (8, 1, 2, 3, 4, 5, 6, 7) for names in itertools.combinations(NAMES, n)]
SOME_SUBSETS = [
    NAMES,
    ("x", "sequence_lens", "initial_h"),
    ("x", "r", "sequence_lens"),
    ("x", "initial_h"),
    ("x", "reset"),
    *SUBSETS[1:9],
]
N = 3  # independent problems
TOLERANCE = {"rtol": 0, "atol": 2e-5}


def _stacked_inputs(case: Case, names) -> tuple[Inputs, Inputs]:
    """Inputs with a leading axis of N on the named arrays, and their `in_axes`."""
    drawn = [make_inputs(case.replace(seed=seed), "float32")[0] for seed in range(N)]
    lens = np.stack([lengths(case.T, case.B, np.random.default_rng(seed)) for seed in range(N)])
    drawn = [one._replace(sequence_lens=n) for one, n in zip(drawn, lens, strict=True)]
    stacked = {name: np.stack([getattr(one, name) for one in drawn]) for name in names}
    return drawn[0]._replace(**stacked), Inputs(*(0 if name in names else None for name in NAMES))


def _problem(inputs: Inputs, in_axes: Inputs, i: int) -> Inputs:
    return Inputs(*(a if axis is None else a[i] for a, axis in zip(inputs, in_axes, strict=True)))


@partial(jax.jit, static_argnames=("backend", "settings", "in_axes"))
def _mapped(inputs, *, backend, settings, in_axes):
    return jax.vmap(partial(_results, backend, settings), in_axes=tuple(in_axes))(*inputs)


@partial(jax.jit, static_argnames=("backend", "settings"))
def _alone(inputs, *, backend, settings):
    return _results(backend, settings, *inputs)


def _results(backend, settings, *inputs):
    """The values, and the gradients of a loss with a different weight for each element."""
    inputs = Inputs(*inputs)
    differentiable = {name: getattr(inputs, name) for name in DIFFERENTIABLE}

    def loss(differentiable):
        y, y_h = backend.gru(*inputs._replace(**differentiable), **dict(settings))
        weight = jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)
        return jnp.vdot(weight, y) + jnp.sum(y_h**2), (y, y_h)

    gradients, values = jax.grad(loss, has_aux=True)(differentiable)
    return values, gradients


def _check_choice(backend, names):
    case = Case(T=4, B=2, I=3, H=5, linear_before_reset=len(names) % 2 == 1, direction="reverse")
    settings = tuple(case.settings.items())
    inputs, in_axes = _stacked_inputs(case, names)
    inputs = backend.put(inputs)
    mapped = _mapped(inputs, backend=backend, settings=settings, in_axes=in_axes)
    one_by_one = [_alone(_problem(inputs, in_axes, i), backend=backend, settings=settings) for i in range(N)]
    expected = jax.tree.map(lambda *leaves: np.stack(leaves), *one_by_one)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **TOLERANCE), mapped, expected)


@pytest.mark.parametrize("names", thorough_after(37, SUBSETS), ids="-".join)
def test_every_subset_of_mapped_arguments(names):
    _check_choice(CPU_KERNEL, names)


@pytest.mark.parametrize(
    "backend", [XLA, *(pytest.param(b, marks=pytest.mark.gpu) for b in (XLA_ON_GPU, CUDA))], ids=str
)
@pytest.mark.parametrize("names", thorough_after(2, SOME_SUBSETS), ids="-".join)
def test_some_subsets_of_mapped_arguments_on_other_backends(backend, names):
    """They share the batching rule with the kernel and fold the problems into another op."""
    _check_choice(backend, names)


@pytest.mark.parametrize("given", ["b", "sequence_lens", "initial_h", "reset", "nothing"])
def test_absent_arguments(backend, given):
    case = Case(T=4, B=2, I=3, H=5, direction="bidirectional")
    inputs, in_axes = _stacked_inputs(case, ("x", given) if given != "nothing" else ("x",))
    absent = {name: None for name in OPTIONAL if name != given}
    inputs, in_axes = backend.put(inputs._replace(**absent)), in_axes._replace(**absent)
    call = partial(backend.gru, **case.settings)
    y, y_h = jax.jit(jax.vmap(lambda *a: call(*a), in_axes=tuple(in_axes)))(*inputs)
    for i in range(N):
        y_i, y_h_i = call(*_problem(inputs, in_axes, i))
        np.testing.assert_allclose(y[i], y_i, **TOLERANCE)
        np.testing.assert_allclose(y_h[i], y_h_i, **TOLERANCE)


def test_other_axes_than_the_first(backend):
    inputs, _ = _stacked_inputs(Case(T=4, B=2, I=3, H=5), ("x", "initial_h"))
    inputs = backend.put(inputs._replace(x=np.moveaxis(inputs.x, 0, 2), initial_h=np.moveaxis(inputs.initial_h, 0, 3)))
    axes = Inputs(2, None, None, None, None, -1)
    y, y_h = jax.vmap(backend.gru, in_axes=tuple(axes), out_axes=(4, 1))(*inputs)
    for i in range(N):
        y_i, y_h_i = backend.gru(*inputs._replace(x=inputs.x[:, :, i], initial_h=inputs.initial_h[..., i]))
        np.testing.assert_allclose(y[..., i], y_i, **TOLERANCE)
        np.testing.assert_allclose(y_h[:, i], y_h_i, **TOLERANCE)


@pytest.mark.parametrize("inner", ["x", "w", "b"])
def test_nested_vmap(backend, inner):
    """Two mapped axes: the outer on x, the inner on x, weights or biases."""
    case = Case(T=3, B=2, I=3, H=4)
    inputs, outer_axes = _stacked_inputs(case, ("x", "sequence_lens"))
    values = np.stack([getattr(make_inputs(case.replace(seed=9 + i), "float32")[0], inner) for i in range(2)])
    if inner == "x":
        inputs = inputs._replace(x=np.stack([inputs.x, inputs.x[::-1]], 1))
    else:
        inputs = inputs._replace(**{inner: values})
    inputs = backend.put(inputs)
    inner_axes = Inputs(*(0 if name == inner else None for name in NAMES))
    settings = tuple(case.settings.items())
    results = partial(_results, backend, settings)
    mapped = jax.jit(jax.vmap(jax.vmap(results, in_axes=tuple(inner_axes)), in_axes=tuple(outer_axes)))(*inputs)
    for i in range(N):
        for j in range(2):
            one = _problem(_problem(inputs, outer_axes, i), inner_axes, j)
            expected = _alone(one, backend=backend, settings=settings)
            found = jax.tree.map(lambda leaf, i=i, j=j: leaf[i, j], mapped)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **TOLERANCE), found, expected)


@pytest.mark.parametrize(
    "names",
    [("x",), ("x", "w"), ("sequence_lens",), ("reset",), ("initial_h", "x", "sequence_lens", "reset_h")],
    ids="-".join,
)
def test_grad_of_vmap_sums_over_the_problems(backend, names):
    case = Case(T=4, B=2, I=3, H=5, linear_before_reset=True)
    inputs, in_axes = _stacked_inputs(case, names)
    inputs = backend.put(inputs)
    differentiable = {name: getattr(inputs, name) for name in DIFFERENTIABLE}

    def loss(differentiable, gru, run):
        return sum(jnp.sum(out**2) for out in run(gru, inputs._replace(**differentiable)))

    def mapped(gru, inputs):
        return jax.vmap(partial(gru, **case.settings), in_axes=tuple(in_axes))(*inputs)

    def looped(gru, inputs):
        ones = [gru(*_problem(inputs, in_axes, i), **case.settings) for i in range(N)]
        return [jnp.stack(parts) for parts in zip(*ones, strict=True)]

    gradient = jax.jit(jax.grad(loss), static_argnums=(1, 2))
    found, expected = (gradient(differentiable, backend.gru, run) for run in (mapped, looped))
    for name in differentiable:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=5e-5, err_msg=name)


def test_per_example_gradients_of_shared_weights(backend):
    """`vmap(grad)` with only x mapped: one weight gradient per problem, not their sum."""
    case = Case(T=4, B=1, I=3, H=5)
    inputs, in_axes = _stacked_inputs(case, ("x",))
    inputs = backend.put(inputs)

    def gradient(*inputs):
        inputs = Inputs(*inputs)
        return jax.grad(lambda r: jnp.sum(backend.gru(*inputs._replace(r=r))[0] ** 2))(inputs.r)

    found = jax.jit(jax.vmap(gradient, in_axes=tuple(in_axes)))(*inputs)
    assert found.shape == (N, *inputs.r.shape)
    for i in range(N):
        np.testing.assert_allclose(found[i], gradient(*_problem(inputs, in_axes, i)), **TOLERANCE)


@pytest.mark.parametrize("implementation", ["cpu", "xla"])
def test_per_example_gradients_copy_no_weights(implementation):
    examples, (T, B, I, H) = 7, (9, 2, 3, 5)  # noqa: E741
    inputs, in_axes = _stacked_inputs(Case(T=T, B=B, I=I, H=H), ("x",))
    inputs = inputs._replace(x=np.stack([inputs.x[0]] * examples))
    call = partial(_results, dataclasses.replace(CPU_KERNEL, implementation=implementation), ())
    text = jax.jit(jax.vmap(call, tuple(in_axes))).lower(*inputs).as_text()
    recurrences = re.findall(r"custom_call @jaxgrad_cpu_gru_.*|stablehlo.while.*", text)
    assert len(recurrences) == 2
    for recurrence in recurrences:
        operands = recurrence.split(" -> ")[0]
        assert not re.search(rf"tensor<{examples}x(1x)?{3 * H}x({I}|{H})xf32>", operands)


def _gradients_of_examples_and_groups(backend, outer, inner):
    """Gradients of the weights under two levels of `vmap` over the named arguments, and one by one."""
    case = Case(T=4, B=2, I=3, H=5, linear_before_reset=True)
    inputs, outer_axes = _stacked_inputs(case, outer)
    drawn = [make_inputs(case.replace(seed=9 + i), "float32")[0] for i in range(2)]
    inputs = inputs._replace(**{name: np.stack([getattr(one, name) for one in drawn]) for name in inner})
    inputs = backend.put(inputs)
    inner_axes = Inputs(*(0 if name in inner else None for name in NAMES))
    results = partial(_results, backend, tuple(case.settings.items()))
    mapped = jax.jit(jax.vmap(jax.vmap(results, in_axes=tuple(inner_axes)), in_axes=tuple(outer_axes)))(*inputs)
    for i, j in itertools.product(range(N), range(2)):
        one = _problem(_problem(inputs, outer_axes, i), inner_axes, j)
        yield jax.tree.map(lambda leaf, i=i, j=j: leaf[i, j], mapped), results(*one)


@pytest.mark.parametrize(
    ("outer", "inner"),
    [(("x",), ("w", "r", "b")), (("w", "r", "b"), ("x",)), (("x",), ("initial_h",)), (("r",), ("w",))],
    ids=str,
)
def test_examples_and_groups(backend, outer, inner):
    """Examples of groups, groups of examples, examples of examples, and groups of groups."""
    for found, expected in _gradients_of_examples_and_groups(backend, outer, inner):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **TOLERANCE), found, expected)


def test_jacobian_of_the_weights(backend):
    """`vmap` of a pullback: only the cotangents are mapped."""
    inputs = backend.put(make_inputs(Case(T=3, B=2, I=2, H=3), "float32")[0])

    def states(gru, r):
        return gru(*inputs._replace(r=r))[1]

    found = jax.jit(jax.jacrev(partial(states, backend.gru)))(inputs.r)
    expected = jax.jacrev(partial(states, gru_references.forward))(inputs.r)
    np.testing.assert_allclose(found, expected, **TOLERANCE)


def _groups_of_weights(case, groups):
    """Inputs of which all but x and the lengths have a first axis of groups, and their `in_axes`."""
    drawn = [make_inputs(case.replace(seed=seed), "float32")[0] for seed in range(groups)]
    names = ("w", "r", "b", "initial_h", "reset_h")
    stacked = {name: np.stack([getattr(one, name) for one in drawn]) for name in names}
    return drawn[0]._replace(**stacked), Inputs(*(0 if name in names else None for name in NAMES))


@pytest.mark.parametrize("sizes", [(2, 1, 2, 3), (9, 16, 17, 40), (3, 2, 3, 5)], ids=str)
@pytest.mark.parametrize("groups", [2, 70])
def test_groups_of_weights_match_single_calls(groups, sizes):
    """Many small groups run at once, each on one thread, and few large ones one after the other."""
    case = Case(*sizes, direction="bidirectional", linear_before_reset=sizes[0] == 2)
    settings = tuple(case.settings.items())
    inputs, in_axes = _groups_of_weights(case, groups)
    inputs = CPU_KERNEL.put(inputs)
    found = _mapped(inputs, backend=CPU_KERNEL, settings=settings, in_axes=in_axes)
    for i in range(groups):
        expected = _alone(_problem(inputs, in_axes, i), backend=CPU_KERNEL, settings=settings)
        jax.tree.map(lambda a, b, i=i: np.testing.assert_array_equal(a[i], b), found, expected)


@pytest.mark.parametrize("nested", [False, True])
def test_groups_of_weights_are_one_call_of_each_kernel(nested):
    inputs, in_axes = _groups_of_weights(Case(T=4, B=2, I=3, H=5, sequence_lens=False), 3)
    call = partial(_results, CPU_KERNEL, ())
    mapped = jax.vmap(call, tuple(in_axes))
    if nested:  # examples of each group, which fold into the batch
        inputs = inputs._replace(x=np.stack([inputs.x] * 2))
        examples = jax.vmap(call, tuple(0 if name == "x" else None for name in NAMES))
        mapped = jax.vmap(examples, tuple(in_axes))
    text = jax.jit(mapped).lower(*inputs).as_text()
    assert "stablehlo.while" not in text
    assert [text.count(f"custom_call @jaxgrad_cpu_gru_{name}") for name in ("forward", "backward")] == [1, 1]
    rows = 4 if nested else 2
    groups = 6 if nested else 3  # each example has its own gradients of the weights
    (forward,) = [line for line in text.splitlines() if "custom_call @jaxgrad_cpu_gru_forward" in line]
    (backward,) = [line for line in text.splitlines() if "custom_call @jaxgrad_cpu_gru_backward" in line]
    assert f"tensor<3x4x1x{rows}x5xf32>" in forward
    assert f"tensor<{groups}x1x15x5xf32>" in backward


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("name", ["x", "w"])
def test_mapped_axis_of_size_zero_and_one(backend, size, name):
    case = Case(T=3, B=2, I=3, H=4)
    inputs = make_inputs(case, "float32")[0]
    in_axes = Inputs(*(0 if n == name else None for n in NAMES))
    inputs = backend.put(inputs._replace(**{name: np.stack([getattr(inputs, name)] * 2)[:size]}))
    settings = tuple(case.settings.items())
    (y, y_h), gradients = _mapped(inputs, backend=backend, settings=settings, in_axes=in_axes)
    assert y.shape == (size, 3, 1, 2, 4)
    assert y_h.shape == (size, 1, 2, 4)
    assert gradients["w"].shape == (size, 1, 12, 3)


def test_a_gradient_penalty_under_vmap(backend):
    inputs, _ = _stacked_inputs(Case(T=3, B=1, I=2, H=3), ("x",))
    inputs = backend.put(inputs)

    def penalty(x):
        gradient = jax.grad(lambda x: jnp.sum(backend.gru(*inputs._replace(x=x))[0] ** 2))(x)
        return jnp.sum(gradient**2)

    second = jax.grad(penalty)
    found = jax.jit(jax.vmap(second))(inputs.x)
    for i in range(N):
        np.testing.assert_allclose(found[i], jax.jit(second)(inputs.x[i]), **TOLERANCE)
