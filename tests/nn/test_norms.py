"""Group, layer, instance and RMS normalization of flax, equinox, Haiku and Keras on jaxgrad, against their own layers.

The same variables go into both: values, gradients and new variables agree. A call that no op computes is the program
of the framework.
"""

from __future__ import annotations

from functools import partial

import equinox as eqx
import flax.linen
import haiku as hk
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from converted_gru import assert_same_bits, assert_trees_close, random_like
from converted_layers import images, loss
from flax import nnx

import jaxgrad.nn
from jaxgrad._src.nn import norms

pytestmark = pytest.mark.jax_version

C = 8
X = jnp.asarray(1 + images(4, 5))  # [3, 4, 5, C]
FIRST = jnp.moveaxis(X, -1, 1)
INTS, COMPLEX, MASK = (10 * X).astype(int), X + 1j, jnp.arange(X.size).reshape(X.shape) % 3 > 0
WIDE = {"param_dtype": jnp.float64}

# For each library a function `(library, name, x, settings, call)` that returns the initial variables of a layer and a
# function of variables and x. `settings` are arguments of the constructor and `call` those of the call.


def linen(library, name, x, settings, call):
    layer = getattr(library, name)(**settings)
    init = layer.clone(axis_name=None).init(jax.random.key(0), x)
    return init, lambda variables, x: layer.apply(variables, x, **call)


def nnx_(library, name, x, settings, call):
    layer = getattr(library, name)(**{"num_features": C, **settings}, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    leaves, structure = jax.tree.flatten(state)
    return leaves, lambda leaves, x: nnx.merge(graph, structure.unflatten(leaves))(x, **call)


def equinox(library, name, x, settings, call):
    arrays, static = eqx.partition(getattr(library, name)(**settings), eqx.is_array)
    leaves, structure = jax.tree.flatten(arrays)
    return leaves, lambda leaves, x: jax.vmap(eqx.combine(structure.unflatten(leaves), static))(x)


def haiku(library, name, x, settings, call):
    module = hk.without_apply_rng(hk.transform(lambda x: getattr(library, name)(**settings)(x, **call)))
    return module.init(jax.random.key(0), x), module.apply


def keras_(library, name, x, settings, call):
    layer = getattr(library, name)(**{"dtype": "float64", **settings})
    layer.build(x.shape)
    weights = [[v.value for v in part] for part in (layer.trainable_variables, layer.non_trainable_variables)]
    return weights, lambda weights, x: layer.stateless_call(*weights, x, **call)


LIBRARIES = {
    linen: (flax.linen, jaxgrad.nn.linen),
    nnx_: (nnx, jaxgrad.nn.nnx),
    equinox: (eqx.nn, jaxgrad.nn.equinox),
    haiku: (hk, jaxgrad.nn.haiku),
    keras_: (keras.layers, jaxgrad.nn.keras),
}


def _both(of, name, x, settings, call=()):
    """The layer of the framework and that of jaxgrad."""
    theirs, ours = LIBRARIES[of]
    if not hasattr(theirs, name):
        pytest.skip(f"this release of {theirs.__name__} has no {name}")
    return [of(library, name, x, settings, dict(call)) for library in (theirs, ours)]


def _id(case):
    return f"{case[0].__name__.rstrip('_')}.{case[1]}" if isinstance(case, tuple) else None


VECTORS, BFLOAT16, FLOAT16 = X[:, 0, 0], X.astype(jnp.bfloat16), X.astype(jnp.float16)
SCALED = {"create_scale": True, "create_offset": True}
CASES = [
    (linen, "GroupNorm", X, {**WIDE, "num_groups": 4}),
    (linen, "GroupNorm", X, {**WIDE, "num_groups": None, "group_size": 4, "use_bias": False, "epsilon": 1e-3}),
    (linen, "GroupNorm", X, {**WIDE, "num_groups": 2, "reduction_axes": (2, 3)}),
    (linen, "GroupNorm", X.astype(jnp.float32), {"num_groups": 2, "dtype": jnp.bfloat16}),
    (linen, "LayerNorm", BFLOAT16, {"param_dtype": jnp.bfloat16}),
    (linen, "LayerNorm", X, {**WIDE, "reduction_axes": (1, 2, 3), "use_scale": False, "use_fast_variance": False}),
    (linen, "LayerNorm", X, {**WIDE, "reduction_axes": (2, 3), "feature_axes": (-1, 2)}),
    (linen, "LayerNorm", X, {**WIDE, "reduction_axes": 1, "feature_axes": (2, 3)}),
    (linen, "InstanceNorm", X, {**WIDE}),
    (linen, "RMSNorm", X, {**WIDE, "reduction_axes": (1, 2, 3), "epsilon": 1e-3}),
    (nnx_, "GroupNorm", VECTORS, {**WIDE, "num_groups": 2, "use_scale": False}),
    (nnx_, "LayerNorm", X, {**WIDE}),
    (nnx_, "LayerNorm", X, {**WIDE, "num_features": 5 * C, "reduction_axes": (2, 3), "feature_axes": (2, 3)}),
    (nnx_, "InstanceNorm", FIRST, {**WIDE, "feature_axes": 1}),
    (nnx_, "RMSNorm", X.astype(jnp.float32), {"dtype": jnp.bfloat16}),
    (equinox, "GroupNorm", FIRST, {"groups": 4, "channels": C}),
    (equinox, "GroupNorm", FIRST.astype(jnp.bfloat16), {"groups": 2, "channelwise_affine": False}),
    (equinox, "LayerNorm", X, {"shape": (4, 5, C), "eps": 1e-3}),
    (equinox, "LayerNorm", FLOAT16[:, 0, 0], {"shape": C, "use_bias": False}),
    (equinox, "RMSNorm", VECTORS, {"shape": C}),
    (haiku, "GroupNorm", X, {"groups": 4}),
    (haiku, "GroupNorm", FIRST, {"groups": 2, "data_format": "channels_first", "create_scale": False}),
    (haiku, "GroupNorm", X, {"groups": 2, "axis": slice(2, None)}),
    (haiku, "LayerNorm", X, {"axis": -1, "create_scale": True, "create_offset": False, "eps": 1e-3}),
    (haiku, "LayerNorm", X, {"axis": slice(1, None), **SCALED, "param_axis": (2, 3)}),
    (haiku, "InstanceNorm", FIRST, {**SCALED, "data_format": "channels_first"}),
    (haiku, "RMSNorm", BFLOAT16, {"axis": [2, 3]}),
    (keras_, "BatchNormalization", X, {"momentum": 0.8}, {"training": True}),
    (keras_, "BatchNormalization", FIRST, {"axis": 1, "center": False}),
    (keras_, "GroupNormalization", X, {"groups": 4}),
    (keras_, "GroupNormalization", FIRST, {"groups": -1, "axis": 1, "scale": False}),
    (keras_, "LayerNormalization", FLOAT16, {"axis": [2, 3], "dtype": "mixed_float16"}),
    (keras_, "RMSNormalization", X, {"axis": -1}),
]


@pytest.mark.parametrize("case", CASES, ids=_id)
def test_layer(case):
    of, x, settings = case[0], *case[2:4]
    (variables, theirs), (own, ours) = _both(*case)
    assert_same_bits(own, variables)
    variables = jax.tree.map(lambda a: abs(a) + jnp.asarray(0.3, a.dtype), random_like(variables))

    def of_result(layer, variables, x):
        result = layer(variables, x)
        return loss(jax.tree.leaves(result)[0].astype(jnp.float64)), result

    def run(variables, x):
        return [jax.value_and_grad(of_result, (1, 2), has_aux=True)(layer, variables, x) for layer in (ours, theirs)]

    assert ["jaxgrad" in _program(layer, variables, x) for layer in (ours, theirs)] == [True, False]
    is_narrow = x.dtype.itemsize == 2 or jnp.bfloat16 in settings.values()
    # Keras computes in float32.
    assert_trees_close(*jax.jit(run)(variables, x), 0.03 if is_narrow else 1e-5 if of is keras_ else 1e-10)


def _program(layer, variables, x):
    return str(jax.make_jaxpr(layer, axis_env=[("batch", 2)])(variables, x))


FLAX = ("GroupNorm", "LayerNorm", "InstanceNorm", "RMSNorm")
OF_FLAX = [
    *((name, X, {}, {"mask": MASK}) for name in FLAX),
    *((name, X, {"axis_name": "batch"}) for name in FLAX),
    ("LayerNorm", INTS, {}),
    ("GroupNorm", COMPLEX, {}),
    ("LayerNorm", X, {"dtype": jnp.complex64}),
    ("LayerNorm", X, {"reduction_axes": 1, "feature_axes": 1, "num_features": 4}),
    ("RMSNorm", X, {"reduction_axes": 2}),
]


def _of_flax(of, name, x, settings, *call):
    settings = {"num_groups": 4, **settings} if name == "GroupNorm" else settings
    return (of, name, x, {k: v for k, v in settings.items() if of is nnx_ or k != "num_features"}, *call)


OWN = [
    *(_of_flax(of, *case) for of in (linen, nnx_) for case in OF_FLAX),
    (linen, "GroupNorm", X, {"num_groups": 4, "force_float32_reductions": False}),
    (linen, "InstanceNorm", X, {"feature_axes": (1, 3)}),
    (linen, "LayerNorm", X, {"reduction_axes": (1, 2), "feature_axes": (2, 3)}),
    (equinox, "GroupNorm", FIRST + 1j, {"groups": 2, "channelwise_affine": False}),
    (equinox, "LayerNorm", COMPLEX, {"shape": X.shape[1:], "use_bias": False}),
    (equinox, "RMSNorm", INTS, {"shape": X.shape[1:]}),
    (haiku, "GroupNorm", X, {"groups": 2, "axis": (1, -1)}),
    (haiku, "GroupNorm", X, {"groups": 2, "create_scale": False}, {"scale": X[0, 0, 0]}),
    (haiku, "LayerNorm", X, {"axis": 1, **SCALED, "param_axis": 1}),
    (haiku, "InstanceNorm", X, {"create_scale": True, "create_offset": False}, {"offset": X[0, 0, 0]}),
    (haiku, "RMSNorm", X, {"axis": (1, 2)}),
    (keras_, "BatchNormalization", X, {}, {"training": True, "mask": MASK[..., 0]}),
    (keras_, "GroupNormalization", INTS, {"groups": 2}),
    (keras_, "LayerNormalization", X, {"axis": [1, 2]}),
    pytest.param(
        (keras_, "LayerNormalization", X, {"rms_scaling": True}),
        marks=pytest.mark.filterwarnings("ignore:You passed `rms_scaling"),
    ),
    (keras_, "RMSNormalization", X[:, :1], {"axis": [1]}),
]


@pytest.mark.parametrize("case", OWN, ids=_id)
def test_calls_of_the_framework(case):
    """Calls that no op computes run the same program as the layer of the framework."""
    (variables, theirs), (own, ours) = _both(*case)
    assert_same_bits(own, variables)
    assert _program(ours, variables, case[2]) == _program(theirs, variables, case[2])


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_haiku_promotes(name):
    """Parameters in float32 make the result of x in bfloat16 float32."""
    settings = {"axis": -1, "create_scale": True} | ({} if name == "RMSNorm" else {"create_offset": True})
    (variables, theirs), (_, ours) = _both(haiku, name, X.astype("float32"), settings, {})
    x = X.astype("bfloat16")
    expected, found = theirs(variables, x), ours(variables, x)
    assert jax.tree.map(lambda a: a.dtype, found) == jax.tree.map(lambda a: a.dtype, expected)


@pytest.mark.parametrize("name", FLAX)
@pytest.mark.parametrize("of", [linen, nnx_], ids=["linen", "nnx"])
def test_mask(of, name):
    """Values and gradients are those of the formula, with the means over the elements that the mask selects."""
    G = {"GroupNorm": 4, "InstanceNorm": C}.get(name, 1)
    settings = {**WIDE, **({"num_groups": G} if name == "GroupNorm" else {})}
    variables, layer = of(LIBRARIES[of][1], name, X, settings, {"mask": MASK})
    variables = random_like(variables)

    def formula(variables, x):
        *bias, scale = jax.tree.leaves(variables)  # by their names
        axes = -1 if name in ("LayerNorm", "RMSNorm") else (1, 2, 4)
        groups, mask = (a.reshape(*a.shape[:-1], *([G] if axes != -1 else []), -1) for a in (x, MASK))
        centered = groups
        if name != "RMSNorm":
            centered -= jnp.sum(groups * mask, axes, keepdims=True) / mask.sum(axes, keepdims=True)
        var = jnp.sum(centered**2 * mask, axes, keepdims=True) / mask.sum(axes, keepdims=True)
        return (centered / jnp.sqrt(var + 1e-6)).reshape(x.shape) * scale + sum(bias)

    found, expected = (
        jax.jit(jax.value_and_grad(lambda v, x, f=f: loss(f(v, x)), (0, 1)))(variables, X) for f in (layer, formula)
    )
    assert_trees_close(found, expected, 1e-10)


def test_equinox_under_vmap(monkeypatch):
    """A mapped layer is one call with the batch: the gradient of the weight is not first one for each example."""
    x, layer, shapes = FIRST.reshape(3, C, -1), jaxgrad.nn.equinox.GroupNorm(2, C), []
    of_batch = lambda layer, x: loss(jax.vmap(jax.vmap(layer))(x[None]))  # noqa: E731
    spy = lambda x, *args, **settings: shapes.append(x.shape) or jaxgrad.group_norm(x, *args, **settings)  # noqa: E731
    monkeypatch.setattr(norms, "group_norm", spy)
    jax.eval_shape(jax.grad(of_batch), layer, x)
    assert shapes[-1] == x.shape

    (row,) = jaxgrad.report(jax.grad(of_batch), layer, x).layers
    assert row.scope.endswith("jaxgrad.nn.equinox.GroupNorm")
    mesh, spec = jax.make_mesh((1,), ("devices",)), jax.sharding.PartitionSpec()
    jax.shard_map(jax.grad(of_batch), mesh=mesh, in_specs=spec, out_specs=spec)(layer, x)  # outside jit

    @partial(jax.jit, static_argnums=0)
    def several(norm, x):
        layer = norm(2, C)
        layers = eqx.tree_at(lambda n: (n.weight, n.bias), layer, (X[:, 0, 0], X[:, 1, 0]))
        y, state = jax.vmap(lambda layer, x: layer(x, 7), (0, 0), (0, None))(layers, x)
        assert state == 7
        return y, jax.vmap(jax.grad(lambda layer, x: loss(layer(x))), (None, 0))(layer, x), jax.grad(of_batch)(layer, x)

    layers = (jaxgrad.nn.equinox.GroupNorm, eqx.nn.GroupNorm)
    found, expected = (several(norm, x) for norm in layers)
    assert_trees_close(jax.tree.leaves(found), jax.tree.leaves(expected), 1e-10)


@pytest.mark.parametrize("of", [linen, nnx_, equinox, haiku], ids=["linen", "nnx", "equinox", "haiku"])
def test_random_keys_and_scalars(of):
    settings = {equinox: {"shape": C}, haiku: {"axis": -1, **SCALED}}.get(of, {})
    variables, layer = of(LIBRARIES[of][1], "LayerNorm", VECTORS, settings, {})
    label = r"^jaxgrad\.nn\.\w+\.LayerNorm: \w+ must"
    keys = jax.random.split(jax.random.key(0), C)
    with pytest.raises(TypeError, match=f"{label} be an array of numbers, got key<fry>"):
        layer(variables, keys[None] if of is equinox else keys)
    with pytest.raises(ValueError, match=f"{label} have at least 1 dimension, got a scalar"):
        layer(variables, X[0, 0, 0] if of is equinox else X[0, 0, 0, 0])


def test_keras_saves_and_loads():
    """Configurations are those of Keras, and a saved layer of jaxgrad is one."""
    for name in sorted(set(jaxgrad.nn.keras.__all__) - {"GRU"}):
        theirs, ours = (getattr(library, name)(axis=-1, epsilon=0.1) for library in LIBRARIES[keras_])
        assert {**ours.get_config(), "name": None} == {**theirs.get_config(), "name": None}
        loaded = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(ours))
        assert type(loaded) is type(ours)
        model = keras.Sequential([keras.Input((4, 32)), loaded])  # with a batch of unknown size
        assert model(np.ones((2, 4, 32))).shape == (2, 4, 32)
