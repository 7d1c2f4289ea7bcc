"""`BatchNorm` of linen, nnx, equinox and Haiku on jaxgrad, against the layers of the frameworks.

The same variables go into both: values, gradients and running statistics agree, in training and in evaluation.
"""

from __future__ import annotations

from functools import partial

import equinox as eqx
import flax.linen
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from converted_gru import assert_same_bits, assert_trees_close, random_like
from converted_layers import images, loss
from flax import nnx

import jaxgrad.nn.equinox
import jaxgrad.nn.haiku
import jaxgrad.nn.linen
import jaxgrad.nn.nnx
from jaxgrad._src.nn.batch_norm import by_batch

pytestmark = pytest.mark.jax_version

C = 8
X = jnp.asarray(1 + images(4, 3))  # [3, 4, 3, C]
WIDE = {"param_dtype": jnp.float64}


def _compare(run, theirs, ours, variables, x, tolerance=1e-10):
    """`run(layer, variables, x)` returns a result and new variables. The second layer runs on jaxgrad."""

    def program(layer):
        def both(variables, x):
            def of_result(variables, x):
                y, new = run(layer, variables, x)
                return loss(y.astype(jnp.float64)), (y, new)

            return jax.value_and_grad(of_result, (0, 1), has_aux=True, allow_int=True)(variables, x)

        return jax.jit(both).trace(variables, x)

    traced = [program(layer) for layer in (ours, theirs)]
    assert ["jaxgrad" in str(t.jaxpr) for t in traced] == [True, False]
    found, expected = (t.lower().compile()(variables, x) for t in traced)
    assert_trees_close(*(jax.tree.map(_without_float0, r) for r in (found, expected)), tolerance)


def _without_float0(array):
    return np.zeros(array.shape) if array.dtype == jax.dtypes.float0 else array


# Settings, dtype of x, tolerance.
FLAX = {
    "float64": ({**WIDE, "momentum": 0.8}, "float64", 1e-10),
    "no scale": ({**WIDE, "use_scale": False, "epsilon": 1e-3}, "float64", 1e-10),
    "features first, no bias": ({**WIDE, "use_bias": False, "axis": 0}, "float64", 1e-10),
    "bfloat16 computation": ({"dtype": jnp.bfloat16}, "float32", 0.5),
    "bfloat16 input": ({}, "bfloat16", 0.02),
}


def _of_features(x, settings, dtype):
    return (jnp.moveaxis(x, -1, 0) if settings.get("axis") == 0 else x).astype(dtype)


def _linen(layer, variables, x, train):
    y, new = layer.apply(variables, x, use_running_average=not train, mutable=["batch_stats"])
    return y, new


EVALUATED = [("no scale", False), ("bfloat16 input", False)]


@pytest.mark.parametrize(("name", "train"), [*((name, True) for name in FLAX), *EVALUATED])
def test_linen(name, train):
    settings, dtype, tolerance = FLAX[name]
    x = _of_features(X, settings, dtype)
    theirs, ours = (norm(**settings) for norm in (flax.linen.BatchNorm, jaxgrad.nn.linen.BatchNorm))
    variables = theirs.init(jax.random.key(0), x, use_running_average=False)
    assert_same_bits(ours.init(jax.random.key(0), x, use_running_average=False), variables)
    variables = _positive(random_like(variables))
    # In evaluation flax computes 1 / sqrt(var + epsilon) in float32, the dtype of the running statistics.
    _compare(partial(_linen, train=train), theirs, ours, variables, x, tolerance if train else max(tolerance, 1e-6))


def _positive(tree):
    """Variances that may be negative are not."""
    return jax.tree_util.tree_map_with_path(lambda path, a: a**2 + 0.3 if "var" in str(path) else a, tree)


def test_the_batch_is_not_rounded_to_the_dtype_of_the_result():
    """The statistics of a batch far from zero are those of its own dtype."""
    x = (100 + X).astype(jnp.float32)
    y, mean, var = by_batch(x, None, None, dtype=jnp.bfloat16, feature_axis=-1, epsilon=1e-5)
    assert y.dtype == jnp.bfloat16
    wide, axes = np.asarray(x, np.float64), (0, 1, 2)
    np.testing.assert_allclose(mean, wide.mean(axes), rtol=1e-6)
    np.testing.assert_allclose(var, wide.var(axes), rtol=1e-3)


@pytest.mark.parametrize("settings", [{"dtype": jnp.complex64}, {"param_dtype": jnp.complex64}])
def test_complex_results_run_code_of_flax(settings):
    programs = []
    for linen, of_nnx in (
        (flax.linen.BatchNorm, nnx.BatchNorm),
        (jaxgrad.nn.linen.BatchNorm, jaxgrad.nn.nnx.BatchNorm),
    ):
        layer, own = linen(**settings), of_nnx(C, **settings, rngs=nnx.Rngs(0))
        variables = layer.init(jax.random.key(0), X, use_running_average=False)
        programs.append([str(jax.make_jaxpr(partial(_linen, layer, train=True))(variables, X)), own(X)])
    assert programs[0][0] == programs[1][0]
    assert_same_bits(programs[1][1], programs[0][1])


def test_linen_over_vmap():
    theirs, ours = (norm(axis_name="batch", **WIDE) for norm in (flax.linen.BatchNorm, jaxgrad.nn.linen.BatchNorm))
    variables = random_like(theirs.init(jax.random.key(0), X, use_running_average=False))

    def run(layer, variables, x):
        return jax.vmap(lambda x: _linen(layer, variables, x, True), out_axes=(0, None), axis_name="batch")(x)

    _compare(run, theirs, ours, _positive(variables), X)
    vectors = X[:, 0, 0]  # an example is a vector of channels
    _compare(run, theirs, ours, _positive(variables), vectors)


def test_linen_in_a_model():
    """Under its name in a model, and with flax's own code where the op has no such call."""

    class Model(flax.linen.Module):
        norm: type

        @flax.linen.compact
        def __call__(self, x, train, mask=None):
            x = self.norm(use_running_average=not train, name="first")(x)
            return self.norm(use_running_average=not train, axis=(1, -1))(jnp.sin(x), mask=mask)

    theirs, ours = Model(flax.linen.BatchNorm), Model(jaxgrad.nn.linen.BatchNorm)
    mask = jnp.arange(12).reshape(3, 4, 1, 1) % 5 > 0
    variables = theirs.init(jax.random.key(0), X, True)
    assert_same_bits(ours.init(jax.random.key(0), X, True), variables)

    def run(model, variables, x):
        return model.apply(variables, x, True, mask, mutable=["batch_stats"])

    _compare(run, theirs, ours, variables, X)


@pytest.mark.parametrize(("name", "train"), [("no scale", True), ("bfloat16 computation", True), ("float64", False)])
def test_nnx(name, train):
    settings, dtype, tolerance = FLAX[name]
    x = _of_features(X, settings, dtype)
    layers = [norm(C, **settings, rngs=nnx.Rngs(0)) for norm in (nnx.BatchNorm, jaxgrad.nn.nnx.BatchNorm)]
    variables = nnx.to_pure_dict(nnx.state(layers[0]))
    assert_same_bits(nnx.to_pure_dict(nnx.state(layers[1])), variables)

    def run(layer, variables, x):
        layer = nnx.clone(layer)
        nnx.update(layer, variables)
        y = layer(x, use_running_average=not train)
        return y, nnx.to_pure_dict(nnx.state(layer))

    _compare(run, *layers, _positive(random_like(variables)), x, tolerance)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    ("mode", "rank", "settings"),
    [("batch", 4, {}), ("batch", 2, {"channelwise_affine": False}), ("ema", 4, {"momentum": 0.7})],
)
def test_equinox(mode, rank, settings, inference):
    x = jnp.moveaxis(X, -1, 1) if rank == 4 else X[:, 0, 0]
    arguments = {"axis_name": "batch", "mode": mode, "eps": 1e-3, "dtype": jnp.float64, **settings}
    layers = [eqx.nn.make_with_state(norm)(C, **arguments) for norm in (eqx.nn.BatchNorm, jaxgrad.nn.equinox.BatchNorm)]
    parts = [eqx.partition(pair, eqx.is_array) for pair in layers]
    assert [a.shape for a in jax.tree.leaves(parts[0][0])] == [a.shape for a in jax.tree.leaves(parts[1][0])]

    def run(static, leaves, x):
        arrays = jax.tree.unflatten(jax.tree.structure(static[1]), leaves)
        layer, state = eqx.combine(arrays, static[0])

        def one(x, state):
            return layer(x, state, inference=inference)

        batched = jax.vmap(one, (0, None), (0, None), axis_name="batch")
        if not inference:
            _, state = batched(2 * x, state)  # the first step, which the mode "ema" treats apart
        elif mode == "ema":
            state = state.set(layer.ema_state_index, (jnp.asarray(np.full(C, 0.3)), jnp.asarray(np.full(C, 1.3))))
        y, state = batched(x, state)
        return y, jax.tree.leaves(state)

    leaves = [random_like(a) if a.dtype == jnp.float64 and not inference else a for a in jax.tree.leaves(parts[0][0])]
    if mode == "ema":
        leaves = [jnp.nan_to_num(a) if a.dtype == jnp.float64 else a for a in leaves]
    static = [(part[1], part[0]) for part in parts]
    _compare(run, *static, leaves, x)


@pytest.mark.parametrize(("data_format", "train"), [("channels_last", False), ("channels_first", True)])
def test_haiku(data_format, train):
    x = X if data_format == "channels_last" else jnp.moveaxis(X, -1, 1)

    def module(norm):
        layer = lambda x, train: norm(True, True, 0.9, data_format=data_format)(x, train)  # noqa: E731
        return hk.without_apply_rng(hk.transform_with_state(layer))

    theirs, ours = module(hk.BatchNorm), module(jaxgrad.nn.haiku.BatchNorm)
    variables = theirs.init(jax.random.key(0), x, True)
    assert_trees_close(ours.init(jax.random.key(0), x, True), variables)
    variables = random_like(variables[0]), theirs.apply(*variables, 2 * x, True)[1]

    def run(module, variables, x):
        return module.apply(*variables, x, train)

    _compare(run, theirs, ours, variables, x)


@pytest.mark.parametrize("train", [False, True])
def test_haiku_promotes(train):
    """Parameters in float32 make the result of x in bfloat16 float32."""

    def run(norm):
        module = hk.without_apply_rng(hk.transform_with_state(lambda x, train: norm(True, True, 0.9)(x, train)))
        return module.apply(*module.init(jax.random.key(0), X.astype("f4"), True), X.astype(jnp.bfloat16), train)

    expected, found = run(hk.BatchNorm), run(jaxgrad.nn.haiku.BatchNorm)
    assert jax.tree.map(lambda a: a.dtype, found) == jax.tree.map(lambda a: a.dtype, expected)


def test_haiku_over_vmap_in_bfloat16():
    """Statistics are sums in float32. Haiku rounds the mean to bfloat16, and is the reference in float32."""

    def module(norm):
        layer = lambda x: norm(True, False, 0.9, cross_replica_axis="batch")(x, is_training=True)  # noqa: E731
        return hk.without_apply_rng(hk.transform_with_state(layer))

    x = X.astype(jnp.bfloat16)
    theirs, ours = (module(norm) for norm in (hk.BatchNorm, jaxgrad.nn.haiku.BatchNorm))
    initial = [jax.vmap(lambda x, m=m: m.init(None, x), out_axes=None, axis_name="batch")(x) for m in (theirs, ours)]
    dtypes, own = (jax.tree.map(lambda a: a.dtype, tree) for tree in initial)
    assert own == dtypes
    y = jax.vmap(lambda x: ours.apply(*initial[1], x)[0], axis_name="batch")(x)
    wide, x = jax.tree.map(lambda a: a.astype("f4") if a.dtype == x.dtype else a, (initial[0], x))
    expected = jax.vmap(lambda x: theirs.apply(*wide, x)[0], axis_name="batch")(x)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype("f4"), expected, rtol=0, atol=2.0**-7)
