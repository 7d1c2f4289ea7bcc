"""`jaxgrad.accelerate` as a decorator and a context manager, around and inside frameworks, and on an unknown JAX."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import pickle
import warnings

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accelerated import PASSES, close, convolve, convolve_arrays, passes
from flax import nnx
from op_cases import loss

import jaxgrad

pytestmark = pytest.mark.jax_version

X, W = convolve_arrays()
IMAGES = np.random.default_rng(2).normal(size=(2, 9, 7, 8)).astype(np.float32)


@pytest.mark.parametrize("function", [3, "text", np.ones(3), (convolve,)], ids=["int", "str", "array", "tuple"])
def test_a_function_must_be_callable(function):
    name = type(function).__name__
    with pytest.raises(TypeError, match=f"jaxgrad.accelerate: function must be callable, got {name}"):
        jaxgrad.accelerate(function)
    with pytest.raises(TypeError, match=f"function must be callable, got {name}"):
        jaxgrad.accelerate()(function)
    with pytest.raises(TypeError, match=f"jaxgrad.report: function must be callable, got {name}"):
        jaxgrad.report(function)


@pytest.mark.parametrize("implementation", ["gpu", "auto", "XLA", "", 3, True])
def test_an_implementation_must_be_known(implementation):
    for arguments in ((), (convolve,)):
        with pytest.raises(ValueError, match=r"jaxgrad.accelerate: implementation must be .*'cudnn'.*, got"):
            jaxgrad.accelerate(*arguments, implementation=implementation)


@pytest.mark.parametrize("implementation", [None, "onednn", "cuda", "cudnn", "xla"])
def test_every_implementation_runs_everywhere(implementation):
    """One that does not run on the platform leaves its convolutions to XLA."""
    accelerated = jaxgrad.accelerate(convolve, implementation=implementation)
    lowered = jax.jit(accelerated).lower(X, W)
    assert passes(lowered) == ({"forward": 1} if implementation in (None, "onednn") else {"xla": 1})
    close(lowered.compile()(X, W), jax.jit(convolve)(X, W))


def test_arguments_are_positional_and_by_keyword():
    with pytest.raises(TypeError):
        jaxgrad.accelerate(function=convolve)
    with pytest.raises(TypeError):
        jaxgrad.accelerate(convolve, "onednn")
    accelerated = jaxgrad.accelerate(lambda x, *rest, w, **settings: convolve(x, w), implementation="onednn")
    close(accelerated(X, 1, 2, w=W, name=3), convolve(X, W))


def test_signature_and_names():
    @jaxgrad.accelerate
    def function(x: jax.Array, w: jax.Array, *, scale: float = 2.0) -> jax.Array:
        """Docstring."""
        return scale * convolve(x, w)

    for accelerated in (function, jaxgrad.accelerate(jax.jit(inspect.unwrap(function), static_argnames="scale"))):
        assert (accelerated.__name__, accelerated.__doc__) == ("function", "Docstring.")
        assert list(inspect.signature(accelerated).parameters) == ["x", "w", "scale"]
        assert accelerated.__module__ == __name__
        close(accelerated(X, W, scale=1.0), convolve(X, W))
        assert "jit_function" in jax.jit(accelerated).lower(X, W).as_text()


def _on_kernels(function, *arguments):
    """Whether all convolutions of a function, at least one, are accelerated."""
    return set(jaxgrad.report(function, *arguments, platform="cpu").counts) == {"onednn"}


class _Layer:
    def __init__(self, w):
        self.w = w

    @jaxgrad.accelerate
    def method(self, x):
        return convolve(x, self.w)

    @jaxgrad.accelerate
    @functools.partial(jax.jit, static_argnums=0)
    def jitted(self, x):
        return convolve(x, self.w)

    @staticmethod
    @jaxgrad.accelerate
    def static(x, w):
        return convolve(x, w)

    @classmethod
    @jaxgrad.accelerate(implementation="onednn")
    def of_class(cls, x, w):
        return convolve(x, w)

    def __call__(self, x):
        return convolve(x, self.w)


def test_methods_and_callable_objects():
    layer = _Layer(W)
    for function, arguments in (
        (layer.method, (X,)),
        (layer.jitted, (X,)),
        (layer.static, (X, W)),
        (_Layer.of_class, (X, W)),
        (jaxgrad.accelerate(layer), (X,)),
        (jaxgrad.accelerate(layer.__call__), (X,)),
        (jaxgrad.accelerate(functools.partial(convolve, w=W)), (X,)),
        (functools.partial(jaxgrad.accelerate(convolve), w=W), (X,)),
        (jaxgrad.accelerate(functools.partial(jax.jit(convolve), w=W)), (X,)),
    ):
        assert _on_kernels(function, *arguments)
        close(function(*arguments), convolve(X, W))


def test_a_method_stays_one():
    """Frameworks look for the model that it binds, and `jaxgrad.report` traces the model as an argument."""

    class Model(nnx.Module):
        def __init__(self):
            self.conv = nnx.Conv(8, 6, (3, 3), rngs=nnx.Rngs(0))
            self.calls = nnx.Variable(jnp.zeros((), int))

        def count(self, x):
            self.calls[...] += 1
            return self.conv(x)

        __call__ = count

    model = Model()
    for method in (jaxgrad.accelerate(model.count), jaxgrad.accelerate(model).count):
        assert inspect.ismethod(method)
        assert method.__self__ is model
        assert _on_kernels(method, IMAGES)
        close(method(IMAGES), model.conv(IMAGES))
    assert model.calls == 2

    # Of a model with state too, whose method binds an array.
    def scaled(scale, model, shift, x):
        return scale * model(x) + shift

    partial, accelerate = functools.partial, jaxgrad.accelerate
    for function, arguments in (
        (partial(accelerate(model.count), IMAGES), ()),
        (accelerate(partial(model.count, IMAGES)), ()),
        (partial(partial(accelerate(model.count)), x=IMAGES), ()),
        (accelerate(partial(scaled, 2.0, model, 1.0)), (IMAGES,)),
        (accelerate(partial(partial(scaled, 2.0, shift=1.0), x=IMAGES, model=model)), ()),
    ):
        assert _on_kernels(function, *arguments)
    assert model.calls == 2


def test_stages_of_a_function_under_jit():
    """`lower`, `trace` and `eval_shape`, which functions that are made of it do not inherit."""
    accelerated = jaxgrad.accelerate(jax.jit(lambda x, w: loss(convolve(x, w))))
    assert passes(accelerated.lower(X, W)) == passes(accelerated.trace(X, W).lower()) == {"forward": 1}
    assert accelerated.eval_shape(X, W) == jax.ShapeDtypeStruct((), np.float32)
    gradient = jax.grad(accelerated, (0, 1))
    assert not hasattr(gradient, "lower")
    assert set(passes(jax.jit(gradient).lower(X, W))) == PASSES
    assert set(passes(jaxgrad.accelerate(accelerated).lower(X, W))) == {"forward"}
    assert not hasattr(jaxgrad.accelerate(convolve), "lower")
    with pytest.raises(AttributeError, match="no attribute 'unknown'"):
        _ = accelerated.unknown


def test_nnx():
    """The mark around `nnx.jit`, inside it, and on the method of a module."""

    class Model(nnx.Module):
        def __init__(self):
            self.conv = nnx.Conv(8, 6, (3, 3), rngs=nnx.Rngs(0))

        @jaxgrad.accelerate
        def accelerated(self, x):
            return self.conv(x)

    model = Model()
    expected = model.conv(IMAGES)
    squares = nnx.grad(lambda model, x: jnp.sum(model.conv(x) ** 2))
    around, inside = jaxgrad.accelerate(nnx.jit(squares)), nnx.jit(jaxgrad.accelerate(squares))
    close(jax.tree.leaves(around(model, IMAGES)), jax.tree.leaves(squares(model, IMAGES)), terms=1000)
    close(jax.tree.leaves(inside(model, IMAGES)), jax.tree.leaves(squares(model, IMAGES)), terms=1000)
    close(model.accelerated(IMAGES), expected)
    assert _on_kernels(around, model, IMAGES)
    assert _on_kernels(inside, model, IMAGES)
    assert _on_kernels(model.accelerated, IMAGES)
    assert set(passes(around.lower(model, IMAGES))) == {"forward", "weight_gradient"}


def test_assignments_reach_the_model():
    class Model(nnx.Module):
        def __init__(self):
            self.conv = nnx.Conv(8, 6, (3, 3), rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.conv(x)

    model = Model()
    accelerated = jaxgrad.accelerate(model)
    accelerated.conv = lambda x: 2 * x
    assert model.conv is accelerated.conv
    np.testing.assert_array_equal(accelerated(IMAGES), 2 * IMAGES)
    del accelerated.conv
    assert not hasattr(model, "conv")
    layer = jaxgrad.accelerate(eqx.nn.Conv2d(8, 6, 3, key=jax.random.key(0)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        layer.weight = 0


def test_linen():
    """Around `apply`, and as the decorator of a module's method."""

    class Model(nn.Module):
        @nn.compact
        @jaxgrad.accelerate
        def __call__(self, x):
            return nn.Conv(6, (3, 3))(x)

    class Outside(nn.Module):
        @jaxgrad.accelerate
        @nn.compact
        def __call__(self, x):
            return nn.Conv(6, (3, 3))(x)

    plain, marked = nn.Conv(6, (3, 3)), Model()
    assert _on_kernels(Outside().apply, Outside().init(jax.random.key(0), IMAGES), IMAGES)
    params = plain.init(jax.random.key(0), IMAGES)
    assert _on_kernels(jaxgrad.accelerate(plain.apply), params, IMAGES)
    close(jaxgrad.accelerate(plain.apply)(params, IMAGES), plain.apply(params, IMAGES))
    params = marked.init(jax.random.key(0), IMAGES)
    assert _on_kernels(jax.jit(marked.apply), params, IMAGES)


def test_methods_of_an_accelerated_module_of_linen():
    class Model(nn.Module):
        def setup(self):
            self.conv = nn.Conv(6, (3, 3))

        def encode(self, x):
            return self.conv(x)

        def __call__(self, x):
            return nn.relu(self.encode(x))

    model = Model()
    accelerated = jaxgrad.accelerate(model)
    params = accelerated.init(jax.random.key(0), IMAGES)
    assert jax.tree.structure(params) == jax.tree.structure(model.init(jax.random.key(0), IMAGES))
    assert _on_kernels(accelerated.init, jax.random.key(0), IMAGES)
    for apply, method in (
        (accelerated.apply, None),
        (accelerated.apply, "encode"),
        (accelerated.apply, model.encode),
        (model.apply, accelerated.encode),
    ):
        apply = functools.partial(apply, method=method)
        assert _on_kernels(apply, params, IMAGES)
        close(apply(params, IMAGES), model.apply(params, IMAGES, method=method and "encode"))


def test_equinox():
    """The mark around and inside `eqx.filter_jit`; modules are arguments with leaves that are no arrays."""
    layer = eqx.nn.Conv2d(8, 6, 3, key=jax.random.key(0), dtype=jnp.float32)
    images = np.moveaxis(IMAGES, 3, 1)

    def squares(layer, x):
        return jnp.sum(jax.vmap(layer)(x) ** 2)

    expected = eqx.filter_grad(squares)(layer, images)
    for run in (
        jaxgrad.accelerate(eqx.filter_jit(eqx.filter_grad(squares))),
        eqx.filter_jit(eqx.filter_grad(jaxgrad.accelerate(squares))),
    ):
        close(jax.tree.leaves(run(layer, images)), jax.tree.leaves(expected), terms=1000)
        assert _on_kernels(run, layer, images)


def test_a_module_of_equinox_keeps_its_leaves():
    """As a function alone it would have no gradients, and equinox warns of that."""
    layer = eqx.nn.Conv2d(8, 6, 3, key=jax.random.key(0), dtype=jnp.float32)
    images = np.moveaxis(IMAGES, 3, 1)

    @eqx.filter_jit
    def gradient(layer, images):
        return eqx.filter_grad(lambda layer: jnp.sum(jax.vmap(layer)(images) ** 2))(layer)

    accelerated = jaxgrad.accelerate(layer)
    assert _on_kernels(gradient, accelerated, images)
    found, expected = gradient(accelerated, images), gradient(layer, images)
    close(jax.tree.leaves(found), jax.tree.leaves(expected), terms=1000)
    updated = eqx.apply_updates(accelerated, found)
    assert jax.tree.structure(updated) == jax.tree.structure(jaxgrad.accelerate(layer))
    close(updated.weight, layer.weight + expected.weight, terms=1000)
    assert repr(accelerated) == f"jaxgrad.accelerate({layer!r})"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        eqx.filter_jit(jaxgrad.accelerate(eqx.filter_grad(lambda layer: jnp.sum(layer(images[0])))))(layer)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies(copied):
    accelerated = copied(jaxgrad.accelerate(jax.jit(convolve), implementation="onednn"))
    assert _on_kernels(lambda x, w: accelerated(x, w), X, W)
    with copied(jaxgrad.accelerate()):
        assert _on_kernels(lambda x, w: convolve(x, w), X, W)


def test_pickled_pytree():
    layer = jaxgrad.accelerate(jax.tree_util.Partial(jax.lax.conv, X))
    copied = pickle.loads(pickle.dumps(layer))
    assert jax.tree.structure(copied) == jax.tree.structure(layer)
    assert _on_kernels(copied, W, (1, 1), "SAME")


def test_haiku():
    hk = pytest.importorskip("haiku")
    transformed = hk.without_apply_rng(hk.transform(jaxgrad.accelerate(lambda x: hk.Conv2D(6, 3)(x))))
    plain = hk.without_apply_rng(hk.transform(lambda x: hk.Conv2D(6, 3)(x)))
    params = plain.init(jax.random.key(0), IMAGES)
    for apply in (transformed.apply, jaxgrad.accelerate(plain.apply)):
        assert _on_kernels(apply, params, IMAGES)
        close(apply(params, IMAGES), plain.apply(params, IMAGES))


# A private name of JAX that is missing or changed: a line that runs before jaxgrad is imported.
_CHANGES = {
    "no rule of convolutions": "mlir._lowerings[lax.conv_general_dilated_p] = None; platforms.clear()",
    "rules that are not called": "jax.interpreters.mlir.register_lowering = lambda *_, **__: None",
    "no metadata": "xla_metadata.set_xla_metadata = lambda **_: contextlib.nullcontext()",
    "no equation context": "mlir.LoweringRuleContext.jaxpr_eqn_ctx = property(lambda _: None, lambda _, value: None)",
    "no current metadata": "sys.modules['jax._src.xla_metadata_lib'] = types.ModuleType('empty')",
    "no check for devices": "check = dispatch.__dict__.pop('jaxpr_has_prim_requiring_devices')",
}

_CHANGED = """
import contextlib, sys, types, warnings
import jax, numpy as np
from jax import lax
from jax._src import dispatch
from jax._src.interpreters import mlir
from jax.experimental import xla_metadata
from accelerated import convolve, convolve_arrays
arrays = convolve_arrays()
platforms = mlir._platform_specific_lowerings
{change}
import jaxgrad
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with jaxgrad.accelerate():
        traced = [jax.jit(convolve).trace(*arrays)]
    accelerated = jaxgrad.accelerate(convolve)
    traced.append(jax.jit(accelerated).trace(*arrays))
assert not [equation for each in traced for equation in each.jaxpr.eqns if equation.ctx.xla_metadata]
for warning in caught:
    print(warning.category.__name__, warning.filename, str(warning.message).replace(chr(10), " "))
(row,) = jaxgrad.report(accelerated, *arrays).convolutions
print(row.implementation, row.reason.replace(chr(10), " "))
"""


@pytest.mark.parametrize("name", _CHANGES)
def test_a_release_of_jax_without_a_private_name(run_python, name):
    """One warning, at the caller's line, and the convolutions of XLA."""
    lines = run_python(_CHANGED.format(change=_CHANGES[name]), JAX_PLATFORMS="cpu").stdout.splitlines()
    warning, row = lines
    assert warning.startswith(
        f"RuntimeWarning <string> jaxgrad.accelerate has no effect: jax {jax.__version__} is not supported ("
    )
    assert row.startswith(f"xla jax {jax.__version__} is not supported (")


def test_no_warning_on_this_release():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jaxgrad.accelerate(convolve)(X, W)
