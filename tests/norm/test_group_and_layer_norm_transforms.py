"""`group_norm`, `layer_norm` and `rms_norm` under JAX's transformations, and in jaxgrad's tools."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import CPU_KERNEL, CUDA, XLA, XLA_ON_GPU
from batch_norm_references import in_float64
from norm_cases import NormCase, make_inputs
from op_cases import loss, values_and_gradients
from thorough import thorough_after

import jaxgrad
from jaxgrad._src.norm import measurable
from jaxgrad._src.norm.params import NormProblem

pytestmark = pytest.mark.jax_version

BACKENDS = (CPU_KERNEL, XLA, XLA_ON_GPU, CUDA)
ALL = ("scale", "bias", "residual")
CASES = [
    NormCase(shape=(2, 3, 6), activation="silu", given=ALL),
    NormCase("layer_norm", (2, 3, 6), activation="relu", given=ALL),
    NormCase("rms_norm", (2, 3, 6), activation="gelu", given=("scale",)),
]
N, F32 = 3, np.dtype(np.float32)


def _close(found, expected, tolerance=1e-9):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), found, expected)


def _given(case, dtype="float64"):
    return tuple(a.astype(dtype) for a in make_inputs(case)[0] if a is not None)


def _by_name(case, function):
    """A function of the arrays that are given."""
    names = ("x", *(name for name in ALL if name in case.given))
    return lambda *arrays: function(**dict(zip(names, arrays, strict=True)))


def _both(case, backend):
    return _by_name(case, case.call(backend.implementation)), _by_name(case, case.plain)


@pytest.mark.parametrize("case", [CASES[0], *thorough_after(0, CASES[1:])], ids=str)
def test_second_derivatives_and_forward_mode(backend, case):
    """Gradients of a penalty of gradients, tangents, and tangents of gradients."""
    arrays = _given(case, backend.widest)

    def results(function):
        def penalty(*arrays):
            return sum(jnp.sum(g**2) for g in values_and_gradients(function, *arrays)[1])

        def run(*arrays):
            directions = tuple(map(jnp.sin, arrays))
            pushed = jaxgrad.jvp(lambda *a: values_and_gradients(function, *a), arrays, directions)
            return jax.grad(penalty, tuple(range(len(arrays))))(*arrays), pushed

        return run

    ours, plain = _both(case, backend)
    expected = jax.jit(results(plain))(*in_float64(arrays))
    _close(jax.jit(results(ours))(*backend.put(arrays)), expected, backend.atol(1e-9))


@pytest.mark.parametrize(
    ("case", "names"),
    [
        (CASES[0], ("x",)),
        (CASES[0], ("x", "scale")),
        (CASES[0], ("bias", "residual")),
        (CASES[0], ("x", *ALL)),
        (CASES[1], ("x", "residual")),
        (CASES[1], ("residual", "scale")),
        (CASES[2], ("x",)),
        (CASES[2], ("scale",)),
    ],
    ids=str,
)
def test_vmap(backend, case, names):
    """Per-example values and gradients, of scale and bias too, against a loop."""
    given = [name for name in ("x", *ALL) if name == "x" or name in case.given]
    drawn = [_given(case.replace(seed=seed), backend.widest) for seed in range(N)]
    arrays = [np.stack([d[i] for d in drawn]) if name in names else drawn[0][i] for i, name in enumerate(given)]
    in_axes = tuple(0 if name in names else None for name in given)
    run = partial(values_and_gradients, _by_name(case, case.call(backend.implementation)))
    arrays = backend.put(tuple(arrays))
    found, alone = jax.jit(jax.vmap(run, in_axes))(*arrays), jax.jit(run)
    each = [alone(*(a if axis is None else a[i] for a, axis in zip(arrays, in_axes, strict=True))) for i in range(N)]
    atol = backend.atol(1e-10)
    jax.tree.map(lambda a, *b: np.testing.assert_allclose(a, np.stack(b), rtol=1e-10, atol=atol), found, *each)


def _calls(function, *arrays):
    return [call.shapes for call in jaxgrad.report(function, *arrays, platform="cpu").calls]


def test_examples_that_share_scale_become_samples():
    """As in equinox, where a layer of one row is mapped twice: scale is not broadcast."""
    x, c = jnp.ones((4, 5, 6)), jnp.ones(6)
    layer = jax.vmap(jax.vmap(lambda x: jaxgrad.layer_norm(x, c, c)))
    assert _calls(layer, x) == ["layer_norm x=f64[20,6]"]
    mapped = jax.vmap(lambda x, scale: jaxgrad.group_norm(x, scale, c, num_groups=2, activation="silu"))
    assert _calls(mapped, x[:, None], c + x[:, 0]) == ["group_norm x=f64[1,5,6,1] groups=2 silu calls=4"]
    per_example = jax.vmap(jax.grad(lambda c, x: jnp.sum(jaxgrad.rms_norm(x, c) ** 2)), (None, 0))
    assert _calls(per_example, c, x) == ["rms_norm x=f64[20,6]", "rms_norm x=f64[5,6] calls=4"]


def test_transposed_axes_are_exact(backend):
    case = NormCase("layer_norm", (3, 4, 5, 2), (1, 3))
    x, scale, bias = _given(case, backend.widest)
    found = case.call(backend.implementation)(*backend.put((x, scale, bias)))
    rows = jaxgrad.layer_norm(
        x.transpose(0, 2, 1, 3).reshape(15, 8), scale.ravel(), bias.ravel(), epsilon=case.epsilon, implementation="xla"
    )
    _close(found, rows.reshape(3, 5, 4, 2).transpose(0, 2, 1, 3), backend.atol(1e-12))


@pytest.mark.parametrize(
    ("op", "shape", "settings"),
    [
        ("group_norm", "b, h, 8, 6", {"num_groups": 3}),
        ("layer_norm", "b, h, w", {"axis": (1, 2)}),
        pytest.param("layer_norm", "b, 5, h", {}, marks=pytest.mark.thorough),
        pytest.param("rms_norm", "b, 6", {}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_symbolic_shapes(op, shape, settings):
    """A shape-polymorphic export runs on XLA."""
    shape = jax.export.symbolic_shape(shape)
    axes = settings.get("axis", (len(shape) - 1,))
    parameters = jax.ShapeDtypeStruct(tuple(shape[axis] for axis in axes), np.float64)
    call = partial(getattr(jaxgrad, op), **settings, activation="silu")
    run = jax.jit(partial(values_and_gradients, lambda x, scale, bias: call(x, scale, bias, residual=x)))
    exported = jax.export.export(run, platforms=["cpu"])(jax.ShapeDtypeStruct(shape, np.float64), *[parameters] * 2)
    sizes = tuple(size if isinstance(size, int) else 4 + i for i, size in enumerate(shape))
    scale = np.linspace(0.5, 2, int(np.prod([sizes[axis] for axis in axes]))).reshape([sizes[axis] for axis in axes])
    arrays = np.random.default_rng(0).normal(size=sizes), scale, scale - 1
    with jax.default_device(jax.devices("cpu")[0]):
        _close(exported.call(*arrays), run(*arrays))


@pytest.mark.parametrize("op", ["group_norm", "layer_norm", "rms_norm"])
def test_names_of_passes_and_residuals(op):
    """Profiles show the pass and the op; a checkpoint policy that saves the op's name runs the forward pass once."""
    case = NormCase(op, (4, 6), activation="silu", epsilon=1e-5)
    x, scale, bias = _given(case)
    policy = jax.checkpoint_policies.save_only_these_names(f"jaxgrad.{op}")

    def count(function):
        text = jax.jit(jax.value_and_grad(function)).lower(x).as_text()
        return [text.count(f"call @jaxgrad.{op}_{name}") for name in ("forward", "backward")]

    def function(x):
        return loss(case.call()(x, scale, bias))

    assert count(function) == [1, 1]
    assert count(jax.checkpoint(function)) == [2, 1]
    assert count(jax.checkpoint(function, policy=policy)) == [1, 1]
    report = jaxgrad.report(jax.grad(function), x, platform="cpu")
    assert [(call.op, call.pass_name) for call in report.calls] == [(op, "forward"), (op, "backward")]
    assert jaxgrad.explain(getattr(jaxgrad, op), platform="cpu").op == op


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (
            NormProblem(1, 3, 5, 6, 1, 2, np.dtype("f4"), "silu", True),
            "group_norm x=f32[3,5,6,1] groups=2 silu residual",
        ),
        (NormProblem(1, 7, 1, 6, 1, 1, np.dtype("f4")), "layer_norm x=f32[7,6]"),
        (NormProblem(2, 7, 1, 6, 1, 1, np.dtype("f4"), "relu", centered=False), "rms_norm x=f32[7,6] relu calls=2"),
    ],
)
def test_what_tune_measures(problem, text):
    """The value and the gradients of the call that the text in a tuning describes."""
    assert problem.text("forward", "cpu") == text
    measured = measurable.measurable(problem, "cpu")
    rng = np.random.default_rng(0)
    operands = [rng.normal(size=each.shape).astype(each.dtype) for each in measured.operands]
    recorded = _calls(measured.functions["xla"], *operands)
    assert {shapes.replace(" calls=2", "") for shapes in recorded} == {text.replace(" calls=2", "")}
    assert recorded[-1] == text
    y, gradients = measured.functions["xla"](*operands)
    assert y.shape == operands[0].shape
    assert [g.shape for g in gradients] == [o.shape for o in operands[:-1]]
