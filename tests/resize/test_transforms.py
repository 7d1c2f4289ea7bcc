"""Resize under JAX's transformations, compared with `jax.image.resize` in float64."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformations
from backends import SELECTED, float64_on_cpu
from jax import export
from tolerances import assert_close, input_dtype

import jaxgrad

pytestmark = pytest.mark.jax_version

BACKENDS = SELECTED

SHAPE, LARGER = (2, 4, 6, 3), (2, 8, 2, 3)  # an axis grows, the other shrinks
NAMES = (
    *("vjp", "jvp", "linear_transpose", "hessian", "gradients_of_a_gradient_penalty"),
    *("scan", "cond", "nested_vmap"),
)


def _scaled(function, method="linear"):
    return lambda x, scale: function(x * scale, (*LARGER[:-1], x.shape[-1]), method)


def _arrays(dtype):
    x = np.random.default_rng(0).standard_normal(SHAPE)
    return tuple(np.asarray(a, input_dtype(dtype)) for a in (x, np.linspace(0.5, 2, SHAPE[-1])))


@pytest.mark.parametrize("name", NAMES)
def test_matches_plain_jax(backend, name):
    transformation = getattr(transformations, name)
    found = jax.jit(partial(transformation, _scaled(jaxgrad.resize)))(backend.put(_arrays("float32")))
    with float64_on_cpu():
        x, scale = (np.asarray(a, np.float64) for a in _arrays("float32"))
        expected = jax.jit(partial(transformation, _scaled(jax.image.resize)))((x, scale))
    jax.tree.map(lambda a, b: assert_close(a, b, dtype="float32", terms=100), found, expected)


@pytest.mark.parametrize("method", ["nearest", "linear"])
@pytest.mark.parametrize("in_axis", [0, 2, -1])
def test_vmap(method, in_axis):
    x = np.random.default_rng(1).standard_normal((2, 4, 6, 3)).astype(np.float32)
    mapped = jnp.moveaxis(x, in_axis, 0)
    shape = tuple(2 * size for size in mapped.shape[1:])
    call = partial(jaxgrad.resize, shape=shape, method=method)
    each = jnp.stack([call(one) for one in mapped])
    np.testing.assert_allclose(jax.vmap(call, in_axis)(x), each, rtol=1e-6, atol=1e-6)


def test_eager_calls_are_compiled():
    """Once for each shape; arguments that mean the same share a program."""
    x = jnp.ones((5, 7))
    jaxgrad.resize(x, (10, 7), "linear")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.image, "resize", None)  # called where the program is traced
        jaxgrad.resize(x, [10, np.int64(7)], jax.image.ResizeMethod.LINEAR)


@pytest.mark.parametrize("method", ["nearest", "linear"])
def test_gradients_have_no_scatters_and_no_products(method):
    for old, new in (((2, 4, 6, 3), (2, 8, 18, 3)), ((2, 8, 18, 3), (2, 4, 6, 3))):
        x = jnp.ones(old)
        for platform in ("cpu", "cuda"):
            gradient = jax.jit(jax.grad(lambda x, new=new: jnp.sum(jnp.sin(jaxgrad.resize(x, new, method)))))
            text = gradient.trace(x).lower(lowering_platforms=(platform,)).as_text()
            assert not re.findall("stablehlo.(?:dot|gather|scatter|convolution)", text)
            assert ("optimization_barrier" in text) == (platform == "cpu" and method == "linear")


@pytest.mark.parametrize("method", ["nearest", "linear"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_eval_shape_and_weak_types(method, dtype):
    for x in (jnp.ones((4, 3), dtype), jnp.broadcast_to(jnp.asarray(1.0), (4, 3))):
        for shape in ((8, 1), (4, 3), (5, 3)):
            found, expected = (
                jax.eval_shape(partial(f, shape=shape, method=method), x) for f in (jaxgrad.resize, jax.image.resize)
            )
            assert (found.shape, found.dtype, found.weak_type) == (expected.shape, expected.dtype, expected.weak_type)


def test_strict_settings():
    """With strict dtype promotion, no intermediate NaN, and no hidden change of rank."""
    x = jnp.asarray(_arrays("float32")[0])
    with jax.debug_nans(True), jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        for method in ("nearest", "linear"):
            for antialias in (True, False):
                call = partial(jaxgrad.resize, shape=LARGER, method=method, antialias=antialias)
                assert np.isfinite(jax.jit(jax.grad(lambda x, call=call: jnp.sum(call(x))))(x)).all()


@pytest.mark.parametrize(
    ("sizes", "resized", "method"),
    [
        ("b, 4, 6, 3", lambda b, h, w, c: (b, 2 * h, w // 3, c), "nearest"),
        ("b, 4, 6, 3", lambda b, h, w, c: (b, 2 * h, w // 3, c), "linear"),
        ("b, 2*h, w, 3", lambda b, h, w, c: (b, h // 2, 3 * w, c), "linear"),
        ("b, 2*h, w, 3", lambda b, h, w, c: (b, h + 1, 4, 2 * c), "linear"),
    ],
)
def test_export_with_symbolic_sizes(sizes, resized, method):
    def value_and_gradient(function, x):
        y, pullback = jax.vjp(lambda x: function(x, resized(*x.shape), method), x)
        return y, pullback(jnp.cos(y))[0]

    symbolic = jax.ShapeDtypeStruct(export.symbolic_shape(sizes), jnp.float32)
    exported = export.export(jax.jit(partial(value_and_gradient, jaxgrad.resize)))(symbolic)
    called = export.deserialize(exported.serialize()).call
    x = np.random.default_rng(0).standard_normal((5, 4, 6, 3)).astype(np.float32)
    for a, b in zip(called(x), value_and_gradient(jax.image.resize, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
