"""Each invalid argument raises an error with its name, the expected value and the given value."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgrad

OPS = {"training": jaxgrad.batch_norm_training, "inference": jaxgrad.batch_norm_inference}
SHAPE, C = (4, 5, 3), 3


def _arrays(op: str) -> dict:
    names = ("scale", "bias") if op == "training" else ("scale", "bias", "mean", "var")
    return {"x": np.ones(SHAPE, np.float32), **{name: np.ones(C, np.float32) for name in names}}


def _raises(op: str, error: type[Exception], *parts: str, **changes) -> None:
    pattern = f"^jaxgrad.batch_norm_{op}: " + ".*".join(re.escape(part) for part in parts)
    arrays = _arrays(op)
    arguments = {**arrays, **changes}
    with pytest.raises(error, match=pattern):
        OPS[op](**arguments)


ARRAYS = [(op, name) for op in OPS for name in _arrays(op)]


@pytest.mark.parametrize(("op", "name"), ARRAYS)
def test_non_array_argument(op, name):
    for value in ("text", None, object(), [[1.0], [1.0, 2.0]]):
        _raises(op, TypeError, f"{name} must be an array, got {type(value).__name__}", **{name: value})


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64", "uint8"])
def test_x_dtype(op, dtype):
    _raises(op, TypeError, "x must", "float32, float64, bfloat16, float16", f"got {dtype}", x=np.ones(SHAPE, dtype))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [(), (3,)])
def test_x_rank(op, shape):
    _raises(op, ValueError, f"x must have rank 2 or more, got rank {len(shape)}", x=np.ones(shape, np.float32))


@pytest.mark.parametrize("op", OPS)
def test_feature_axis(op):
    for axis in (3, -4, 2**40):
        _raises(op, ValueError, "feature_axis must lie in [-3, 3)", f"got {axis}", feature_axis=axis)
    for axis in (1.0, "1", None, True, (1,)):
        _raises(op, TypeError, f"feature_axis must be an int, got {type(axis).__name__}", feature_axis=axis)


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, name in ARRAYS if name != "x"])
def test_channel_array_shapes(op, name):
    for shape in ((4,), (1,)):
        _raises(op, ValueError, f"{name} must have the shape [C] = (3,), got {shape}", **{name: np.ones(shape, "f4")})
    _raises(op, ValueError, f"{name} must have rank 1, [C] = (3,), got rank 2", **{name: np.ones((3, 1), "f4")})
    _raises(
        op,
        ValueError,
        f"{name} must have the shape [C] = (5,), got (3,)",
        feature_axis=1,
        **{n: np.ones(3 if n == name else 5, "f4") for o, n in ARRAYS if o == op and n != "x"},
    )


@pytest.mark.parametrize("op", OPS)
def test_channel_array_dtypes(op):
    _raises(op, TypeError, "scale must have the dtype float32, as x has float32, got float64", scale=np.ones(3))
    _raises(op, TypeError, "bias must have the dtype of scale, float32, got float16", bias=np.ones(3, "f2"))
    half = np.ones(SHAPE, np.float16)
    bfloat16 = jnp.ones(3, jnp.bfloat16)
    _raises(op, TypeError, "scale must have the dtype float16 or float32, as x has float16", x=half, scale=bfloat16)
    if op == "inference":
        _raises(op, TypeError, "mean must have the dtype float32, as x has float32, got int32", mean=np.ones(3, "i4"))
        _raises(op, TypeError, "var must have the dtype of mean, float32, got float64", var=np.ones(3))


@pytest.mark.parametrize("op", OPS)
def test_epsilon(op):
    for epsilon in (-1e-9, float("nan"), float("inf"), np.float32(-1)):
        _raises(op, ValueError, "epsilon must be finite and not negative", f"got {epsilon}", epsilon=epsilon)
    for epsilon in ("1e-5", None, True, jnp.float32(1), 1j):
        _raises(op, TypeError, f"epsilon must be a Python number, got {type(epsilon).__name__}", epsilon=epsilon)


def test_residual():
    _raises("training", ValueError, "residual must have the shape of x", "got (4, 5)", residual=np.ones((4, 5), "f4"))
    wrong = np.ones(SHAPE, np.float16)
    _raises("training", TypeError, "residual must have the dtype of x, float32, got float16", residual=wrong)
    _raises("training", TypeError, "residual must be an array, got str", residual="x")


def test_unknown_options():
    for activation in ("tanh", "", 0, jax.nn.tanh):
        expected = f"activation must be one of None, 'relu', 'silu', 'gelu', got {activation!r}"
        _raises("training", ValueError, expected, activation=activation)
    for op in OPS:
        _raises(
            op,
            ValueError,
            "implementation must be one of None, 'xla', 'cpu', 'cuda', 'cudnn', 'onednn', got 'metal'",
            implementation="metal",
        )


def test_statistics_dtype():
    _raises("training", TypeError, "statistics_dtype must have the dtype float32", "got float16", statistics_dtype="f2")
    _raises("training", TypeError, "statistics_dtype must be a dtype or None, got 'text'", statistics_dtype="text")
    _raises(
        "training",
        TypeError,
        "statistics_dtype must have the dtype float16 or float32, as x has float16, got bfloat16",
        x=np.ones(SHAPE, np.float16),
        statistics_dtype=jnp.bfloat16,
    )


ROWS, KC, SG = (2, 4, 6, 5), (1, 6), (2, 3)  # [S, O, C, I], [K, C] and [S, G]
STATISTICS = {"epsilon": 0.0, "centered": True}
FORWARD = {"epsilon": 0.0, "activation": 0, "centered": True}
BACKWARD = {"frozen": False, "centered": True, "activation": 0}
NONE = (0,)


@pytest.mark.parametrize(
    ("handler", "operands", "results", "attributes", "message"),
    [
        ("statistics", [(4, 3)], [SG] * 4, STATISTICS, "x must have the shape [S, O, C, I]"),
        ("statistics", [ROWS], [SG, SG, (2, 6), SG], STATISTICS, "var must have"),
        ("statistics", [ROWS], [SG] * 4, {**STATISTICS, "epsilon": -1.0}, "epsilon must not be negative"),
        ("statistics", [ROWS], [SG] * 4, {**STATISTICS, "centered": False}, "mean and mean_low must be empty"),
        ("statistics", [(2, 0, 6, 5)], [SG] * 4, STATISTICS, "x must have elements"),
        ("statistics", [ROWS], [(2, 4)] * 4, STATISTICS, "C must be a multiple of G"),
        (
            "normalize",
            [ROWS, KC, (1, 5), SG, SG, SG, NONE],
            [ROWS],
            {"activation": 0},
            "bias must have the shape [1, 6]",
        ),
        (
            "normalize",
            [ROWS, KC, KC, SG, SG, SG, ROWS[:3]],
            [ROWS],
            {"activation": 0},
            "residual must have the shape [2, 4, 6, 5]",
        ),
        ("normalize", [ROWS, KC, KC, NONE, SG, SG, NONE], [ROWS], {"activation": 0}, "mean_low requires mean"),
        ("forward", [ROWS, (3, 6), (3, 6), NONE], [ROWS, SG, SG, SG, SG], FORWARD, "S must be a multiple of K"),
        (
            "forward",
            [ROWS, KC, KC, NONE],
            [ROWS, SG, SG, SG, SG],
            {**FORWARD, "activation": 4},
            "activation must be 0, 1, 2 or 3",
        ),
        (
            "backward",
            [ROWS, KC, NONE, SG, SG, SG, NONE, NONE, ROWS, SG, SG],
            [ROWS, KC, KC, NONE],
            {**BACKWARD, "activation": 1},
            "activation requires bias, or relu y",
        ),
        (
            "backward",
            [ROWS, KC, NONE, SG, SG, SG, NONE, NONE, ROWS, SG, SG],
            [ROWS, KC, KC, NONE],
            {**BACKWARD, "frozen": True},
            "frozen statistics exclude",
        ),
    ],
)
def test_handlers_check_their_operands(handler, operands, results, attributes, message):
    types = {int: np.int64, float: np.float64, bool: np.bool_}
    call = jax.ffi.ffi_call(
        f"jaxgrad_cpu_norm_{handler}",
        (*(jax.ShapeDtypeStruct(s, np.float32) for s in results), jax.ShapeDtypeStruct((100000,), np.uint8)),
    )
    with jax.default_device(jax.devices("cpu")[0]):
        arrays = [jnp.ones(shape, np.float32) for shape in operands]
        with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(message)):
            jax.block_until_ready(call(*arrays, **{k: types[type(v)](v) for k, v in attributes.items()}))


def test_too_small_workspace():
    shapes = (*[jax.ShapeDtypeStruct(SG, np.float32)] * 4, jax.ShapeDtypeStruct((64,), np.uint8))
    call = jax.ffi.ffi_call("jaxgrad_cpu_norm_statistics", shapes)
    with (
        jax.default_device(jax.devices("cpu")[0]),
        pytest.raises(jax.errors.JaxRuntimeError, match="workspace is too small"),
    ):
        jax.block_until_ready(call(jnp.ones(ROWS, np.float32), centered=np.True_, epsilon=np.float64(0)))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"axis_name": "d"}, "axis_name must name axes of the enclosing shard_map, pmap or vmap, got 'd'"),
        ({"axis_name": ("batch", "d")}, "axis_name must name axes of the enclosing shard_map, pmap or vmap, got ('b"),
        (
            {"axis_name": "batch", "axis_index_groups": [[0, 1], [2, 3]]},
            "axis_index_groups must be None for axes of vmap, got [[0, 1], [2, 3]]",
        ),
        ({"axis_index_groups": [[0]]}, "axis_index_groups requires axis_name, got axis_name=None"),
        ({"axis_name": (), "axis_index_groups": [[0]]}, "axis_index_groups requires axis_name, got axis_name=()"),
    ],
)
def test_axis_names(names, message):
    c = jnp.ones(3)
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.vmap(lambda x: jaxgrad.batch_norm_training(x, c, c, **names), axis_name="batch")(jnp.ones((4, 2, 3)))


def test_no_axis_names():
    """As in `jax.lax.pmean`, an empty tuple means no axis."""
    x, c = jax.random.normal(jax.random.key(0), (4, 2, 3)), jnp.ones(3)
    found, expected = (
        jax.vmap(lambda x, names=names: jaxgrad.batch_norm_training(x, c, c, axis_name=names), axis_name="batch")(x)
        for names in ((), None)
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("axis_name", [3, b"x"])
def test_an_axis_name_is_a_name(axis_name):
    wanted = f"axis_name must be a name, names or None, got {type(axis_name).__name__}"
    with pytest.raises(TypeError, match=wanted):
        jaxgrad.batch_norm_training(jnp.ones((2, 3)), jnp.ones(3), jnp.ones(3), axis_name=axis_name)


@pytest.mark.parametrize("shape", [(4, 5, 0), (4, 0, 5), (0, 4, 5)], ids=str)
@pytest.mark.parametrize("implementation", [None, "cpu", "xla"])
def test_arrays_without_elements(shape, implementation):
    x, c = np.ones(shape, np.float32), np.ones(shape[-1], np.float32)

    def both(x):
        y, mean, _ = jaxgrad.batch_norm_training(x, c, c, implementation=implementation)
        z = jaxgrad.batch_norm_inference(x, c, c, c, c, implementation=implementation)
        return jax.numpy.sum(y + z), (y, mean)

    gradient, (y, mean) = jax.grad(both, has_aux=True)(x)
    assert (gradient.shape, y.shape, mean.shape) == (shape, shape, c.shape)
