"""Values and gradients of `group_norm`, `layer_norm` and `rms_norm` against the float64 reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import CPU_KERNEL, CUDA, XLA, XLA_ON_GPU
from batch_norm_references import reference, values_and_gradients
from norm_cases import NormCase, check, make_inputs, random_case
from thorough import thorough_after

BACKENDS = (CPU_KERNEL, XLA, XLA_ON_GPU, CUDA)
OPS = ("group_norm", "layer_norm", "rms_norm")
WIDE = ("float64", "float64")
ALL = ("scale", "bias", "residual")

CASES = [
    NormCase(activation="silu", given=ALL),
    NormCase(shape=(3, 6, 4, 5), axis=1, num_groups=3, activation="gelu"),
    NormCase(shape=(2, 5, 6, 7), axis=2, num_groups=6, activation="relu", given=ALL),  # instance norm
    NormCase(shape=(5, 12), num_groups=4),
    NormCase(shape=(2, 9, 11, 32), num_groups=8, dtypes=("bfloat16", "float32"), activation="silu"),
    NormCase(shape=(2, 32, 7, 5), axis=1, num_groups=1, dtypes=("float16", "float16"), activation="relu"),
    NormCase(shape=(2, 40, 50, 6), num_groups=2, dtypes=WIDE, given=("bias",)),
    NormCase("layer_norm", (7, 5, 33)),
    NormCase("layer_norm", (40,), activation="gelu", given=("scale",)),
    NormCase("layer_norm", (3, 4, 5, 6), (-2, -1), activation="silu", given=ALL, dtypes=WIDE),
    NormCase("layer_norm", (3, 7, 4, 5), 1, activation="relu", given=ALL),
    NormCase("layer_norm", (6, 300), dtypes=("bfloat16", "bfloat16"), given=()),
    NormCase("rms_norm", (7, 5, 33), given=("scale",)),
    NormCase("rms_norm", (3, 4, 5, 6), (0, 2), activation="relu", dtypes=WIDE),
    NormCase("rms_norm", (70, 16), activation="gelu", given=ALL, dtypes=("float16", "float32")),
    NormCase("rms_norm", (5, 130), activation="silu", given=ALL),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_float64(backend, case):
    check(backend, case)


@pytest.mark.thorough_on_xla
@pytest.mark.parametrize("seed", thorough_after(3, range(300)))
def test_random_cases(backend, seed):
    check(backend, random_case(seed))


@pytest.mark.thorough_on_xla
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("given", ["x", "scale", "bias", "residual"])
def test_only_the_requested_gradient(backend, op, given):
    case = NormCase(op, (4, 3, 6), activation="relu", given=ALL, dtypes=WIDE).on(backend)
    inputs, dy = make_inputs(case)
    call, at = case.call(backend.implementation), inputs._fields.index(given)
    _, gradients = values_and_gradients(lambda *a: (call(*a),), *backend.put((inputs, (dy,))), [at])
    _, expected = reference(lambda *a: (case.plain(*a),), inputs, (dy,))
    np.testing.assert_allclose(gradients[at], expected[at], rtol=1e-11, atol=backend.atol(1e-11))
    assert [i for i, gradient in enumerate(gradients) if gradient is not None] == [at]


@pytest.mark.parametrize(("op", "axis"), [("group_norm", -1), ("group_norm", 1), ("layer_norm", -1)])
@pytest.mark.parametrize(("mean", "deviation"), [(1e4, 1e-2), (-3e5, 1.0)])
def test_variance_keeps_its_digits_with_a_large_mean(backend, op, axis, mean, deviation):
    """float32 with a mean of up to a million deviations, where E[x^2] - E[x]^2 would lose every digit."""
    case = NormCase(op, (6, 24, 36), axis, num_groups=3, given=(), epsilon=1e-12)
    rng = np.random.default_rng(3)
    x = (mean * (1 + np.arange(6)[:, None, None]) + deviation * rng.standard_normal(case.shape)).astype(np.float32)
    dy = rng.standard_normal(case.shape).astype(np.float32)
    call = case.call(backend.implementation)
    (y,), (dx,) = values_and_gradients(lambda x: (call(x),), *backend.put(((x,), (dy,))))
    (expected,), (expected_dx,) = reference(lambda x: (case.plain(x),), (x,), (dy,))
    np.testing.assert_allclose(y, expected, rtol=0, atol=2e-5)
    np.testing.assert_allclose(dx, expected_dx, rtol=0, atol=2e-5 * np.abs(expected_dx).max())


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize(
    ("where", "activation"), [("x", "silu"), ("scale", None), ("dy", "relu"), ("residual", "gelu")]
)
def test_nonfinite_values_stay_in_their_group(backend, op, value, where, activation):
    case = NormCase(op, (4, 3, 6), given=ALL, activation=activation, dtypes=WIDE).on(backend)
    inputs, dy = make_inputs(case)
    arrays = {**inputs._asdict(), "dy": dy}
    arrays[where].flat[-1] = value
    call = case.call(backend.implementation)
    found = values_and_gradients(lambda *a: (call(*a),), *backend.put((inputs, (dy,))))
    expected = reference(lambda *a: (case.plain(*a),), inputs, (dy,))

    def compare(a, b):
        """Infinities of gradients may be NaN: that depends on the order of sums."""
        a, b = (np.where(np.isfinite(array), array, np.nan) for array in (a, b))
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=backend.atol(1e-9))

    np.testing.assert_allclose(found[0][0], expected[0][0], rtol=1e-9, atol=backend.atol(1e-9))
    jax.tree.map(compare, tuple(found[1]), tuple(expected[1]))


@pytest.mark.parametrize("op", OPS)
def test_zero_variance(backend, op):
    """Constant groups and groups of one element: y is the bias, whatever epsilon is above zero, and dx is zero."""
    constant = jnp.full((4, 3, 6), 1 / 3, jnp.float32).at[1].set(-7.25)
    for x, groups in ((constant, 2), (constant[:, :1], 6), (constant[:, :, :1], 1)):
        case = NormCase(op, x.shape, num_groups=groups)
        scale, bias = (jnp.asarray(a) for a in make_inputs(case)[0][1:3])
        call = case.call(backend.implementation)
        (y,), (dx, dscale, dbias) = values_and_gradients(
            lambda *a, call=call: (call(*a),), *backend.put(((x, scale, bias), (jnp.ones_like(x),)))
        )
        assert np.isfinite(dx).all()
        np.testing.assert_array_equal(dbias, x.shape[0] * x.shape[1])
        if op != "rms_norm":
            np.testing.assert_allclose(y, np.broadcast_to(bias, x.shape), atol=1e-5)
            np.testing.assert_allclose(dscale, 0, atol=1e-4)


@pytest.mark.thorough_on_xla
@pytest.mark.parametrize("op", OPS)
def test_epsilon_zero(backend, op):
    check(backend, NormCase(op, (4, 5, 6), epsilon=0.0, activation="gelu", dtypes=WIDE))


@pytest.mark.parametrize(
    "case",
    [
        NormCase(shape=(0, 3, 6), given=ALL),
        NormCase(shape=(2, 0, 6), activation="silu"),
        NormCase(shape=(2, 3, 0), activation="relu", given=ALL),
        NormCase("layer_norm", (0, 6), activation="gelu", given=ALL),
        NormCase("layer_norm", (3, 0)),
        NormCase("rms_norm", (3, 0, 2), activation="relu"),
    ],
    ids=str,
)
def test_empty_arrays(backend, case):
    inputs, dy = make_inputs(case)
    call = case.call(backend.implementation)
    (y,), gradients = values_and_gradients(lambda *a: (call(*a),), *backend.put((inputs, (dy,))))
    assert y.shape == case.shape
    for array, gradient in zip(inputs, gradients, strict=True):
        assert array is None or (gradient.shape == array.shape and not np.any(gradient))


@pytest.mark.thorough_on_xla
def test_instance_norm_is_group_norm_with_one_channel_a_group(backend):
    case = NormCase(shape=(2, 3, 4, 5), axis=1, num_groups=3)
    (x, scale, bias, _), _ = make_inputs(case)
    expected = (x - x.mean((2, 3), keepdims=True)) / np.sqrt(x.var((2, 3), keepdims=True) + case.epsilon)
    expected = expected * scale[:, None, None] + bias[:, None, None]
    np.testing.assert_allclose(case.call(backend.implementation)(*backend.put((x, scale, bias))), expected, atol=2e-5)
