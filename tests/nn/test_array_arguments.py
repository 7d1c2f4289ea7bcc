"""Values that are not arrays: each op and layer names the argument."""

from __future__ import annotations

import equinox as eqx
import flax.linen
import flax.nnx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgrad
from jaxgrad import nn
from jaxgrad._src.core import checks
from jaxgrad.nn import equinox, haiku, linen, nnx

T, B, I, H = 4, 3, 2, 5  # noqa: E741
KEY = jax.random.key(0)


def _ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


X, STATE = _ones(T, B, I), _ones(B, H)
IMAGES, KERNEL = _ones(1, 2, 5, 5), _ones(3, 2, 2, 2)
CELL = eqx.nn.GRUCell(I, H, key=KEY, dtype=jnp.float32)


def _of_linen(**call):
    rnn = linen.RNN(flax.linen.GRUCell(H), time_major=True)
    return rnn.init(KEY, call.pop("inputs", X), **call)


def _of_nnx(**call):
    rnn = nnx.RNN(flax.nnx.GRUCell(I, H, rngs=flax.nnx.Rngs(0)), time_major=True)
    return rnn(call.pop("inputs", X), **call)


def _of_haiku(input_sequence=X, initial_state=STATE, reset=None):
    def run():
        core = hk.GRU(H) if reset is None else hk.ResetCore(hk.GRU(H))
        return haiku.dynamic_unroll(core, input_sequence if reset is None else (input_sequence, reset), initial_state)

    return hk.transform(run).init(KEY)


def _of_equinox(xs=X, init=STATE, **call):
    return equinox.scan_gru(CELL, init, xs, **call)


def _gru(**arrays):
    return jaxgrad.gru(**{"x": X, "w": _ones(1, 3 * H, I), "r": _ones(1, 3 * H, H), **arrays})


def _conv(op):
    def call(lhs=IMAGES, rhs=KERNEL, **arrays):
        return op(lhs, rhs, (1, 1), "VALID", **arrays)

    return call


def _norm(**arrays):
    return jaxgrad.batch_norm_training(**{"x": _ones(2, 4), "scale": _ones(4), "bias": _ones(4), **arrays})


CALLS = {
    "gru": (_gru, ("x", "w", "r", "b", "initial_h", "reset", "sequence_lens")),
    "conv": (_conv(jaxgrad.conv_general_dilated), ("lhs", "rhs", "bias")),
    "conv_transpose": (_conv(jaxgrad.conv_transpose), ("lhs", "rhs")),
    "batch_norm_training": (_norm, ("x", "scale", "bias", "residual")),
    "nn.GRU": (lambda x=X, **arrays: nn.GRU(I, H, key=KEY)(x, **arrays), ("x", "hx", "reset")),
    "nn.GRU, no batch": (lambda x=X[:, 0], **arrays: nn.GRU(I, H, key=KEY)(x, **arrays), ("x", "hx", "reset")),
    "linen.RNN": (_of_linen, ("inputs", "initial_carry", "seq_lengths", "reset")),
    "nnx.RNN": (_of_nnx, ("inputs", "initial_carry", "seq_lengths", "reset")),
    "linen.BatchNorm": (lambda x: linen.BatchNorm(use_running_average=False).init(KEY, x), ("x",)),
    "nnx.BatchNorm": (lambda x: nnx.BatchNorm(I, rngs=flax.nnx.Rngs(0))(x), ("x",)),
    "scan_gru": (_of_equinox, ("xs", "init", "reset")),
    "dynamic_unroll": (_of_haiku, ("input_sequence", "initial_state", "reset")),
}


@pytest.mark.parametrize("name", ["linen.BatchNorm", "nnx.BatchNorm"])
def test_a_scalar_is_no_batch(name):
    with pytest.raises(ValueError, match=r"BatchNorm: x must have at least 1 dimension, got a scalar"):
        CALLS[name][0](x=2.0)


@pytest.mark.parametrize("name", CALLS)
def test_ints_that_do_not_fit(name):
    call, arguments = CALLS[name]
    for argument in arguments:
        for value in (2**64, [2**64]):
            with pytest.raises(ValueError, match=rf"^jaxgrad[\w.]*: .*\b{argument}.*got"):
                call(**{argument: value})


def test_ints_of_32_bits():
    with (
        jax.enable_x64(False),
        pytest.raises(ValueError, match=r"^op: x must have ints in the range of int32, got 2147483648$"),
    ):
        checks.as_array("op", "x", 2**31)
    with pytest.raises(ValueError, match=r"^op: x must have ints in the range of int64, got \[9223372036854775808, 0"):
        checks.as_array("op", "x", [2**63] + 1000 * [0])


def test_arrays_of_other_libraries():
    class Tensor:  # such as one of PyTorch that requires a gradient
        def __array__(self, *_, **__):
            raise RuntimeError("Can't call numpy() on Tensor that requires grad.")

    with pytest.raises(TypeError, match=r"^op: x must be an array, got Tensor$"):
        checks.as_array("op", "x", Tensor())


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "complex64"])
def test_dtypes_that_are_not_promoted(dtype):
    xs, states = _ones(T, B, I).astype(jnp.dtype(dtype)), _ones(B, H).astype(jnp.dtype(dtype))
    cell = jax.tree.map(lambda array: array.astype(dtype), eqx.filter(CELL, eqx.is_array))
    expected = rf"must have one of the dtypes .*, got {dtype}"
    with pytest.raises(TypeError, match=f"scan_gru: xs {expected}"):
        _of_equinox(xs=xs)
    with pytest.raises(TypeError, match=f"scan_gru: init {expected}"):
        _of_equinox(init=states)
    if dtype != "complex64":
        with pytest.raises(TypeError, match=f"scan_gru: cell {expected}"):
            equinox.scan_gru(eqx.combine(cell, CELL), STATE, X)
    for rnn in (_of_linen, _of_nnx):
        with pytest.raises(TypeError, match=f"RNN: inputs {expected}"):
            rnn(inputs=xs)
        with pytest.raises(TypeError, match=f"RNN: initial_carry {expected}"):
            rnn(initial_carry=states)
    with pytest.raises(TypeError, match=f"dynamic_unroll: input_sequence {expected}"):
        _of_haiku(input_sequence=xs)
    with pytest.raises(TypeError, match=f"dynamic_unroll: initial_state {expected}"):
        _of_haiku(initial_state=states)
    _of_equinox(xs=_ones(T, B, I, dtype=np.int32))  # as the cell itself


def test_dtypes_that_the_cell_casts():
    xs = X.astype(jnp.float8_e4m3fn)
    cell = flax.nnx.GRUCell(I, H, dtype=jnp.float32, rngs=flax.nnx.Rngs(0))
    np.testing.assert_array_equal(nnx.RNN(cell)(xs), nnx.RNN(cell)(X))
    rnn = linen.RNN(flax.linen.GRUCell(H, dtype=jnp.float32))
    np.testing.assert_array_equal(*(rnn.init_with_output(KEY, inputs)[0] for inputs in (xs, X)))


RNN_ARGUMENTS = [
    ("inputs", 2.0, r"inputs must have at least 2 dimensions, \[time, \*batch, I\], got the shape \(\)"),
    ("inputs", _ones(T), r"inputs must have at least 2 dimensions, \[time, \*batch, I\], got the shape \(4,\)"),
    ("inputs", jax.random.split(KEY, (T, B, I)), r"inputs must have one of the dtypes .*, got key<fry>"),
    ("initial_carry", jax.random.split(KEY, (B, H)), r"initial_carry must have one of the dtypes .*, got key<fry>"),
    ("seq_lengths", np.ones(B + 1, int), r"seq_lengths must have the shape \[\*batch\] = \(3,\), got \(4,\)"),
    ("initial_carry", 1.0, r"initial_carry must have rank 2, \[\*batch, H\] = \(3, 5\), got rank 0, \(\)"),
    ("initial_carry", _ones(B, H - 1), r"initial_carry must have the shape \[\*batch, H\] = \(3, 5\), got \(3, 4\)"),
    ("initial_carry", _ones(1, H), r"initial_carry must have the shape \[\*batch, H\] = \(3, 5\), got \(1, 5\)"),
    ("seq_lengths", jax.random.split(KEY, B), r"seq_lengths must be an array of ints, got key<fry>"),
    ("seq_lengths", _ones(B), r"seq_lengths must be an array of ints, got float32"),
]


@pytest.mark.parametrize(("argument", "value", "message"), RNN_ARGUMENTS)
def test_arguments_of_rnn(argument, value, message):
    for name, call in (("linen", _of_linen), ("nnx", _of_nnx)):
        with pytest.raises((TypeError, ValueError), match=rf"^jaxgrad\.nn\.{name}\.RNN: {message}"):
            call(**{argument: value})


def _norm_of_equinox(x):
    norm, state = eqx.nn.make_with_state(equinox.BatchNorm)(I, axis_name="batch", mode="batch")
    return norm(x, state)


def _norm_of_haiku(x):
    return hk.transform_with_state(lambda x: haiku.BatchNorm(True, True, 0.9)(x, True)).init(KEY, x)


@pytest.mark.parametrize(
    "call",
    [CALLS["linen.BatchNorm"][0], CALLS["nnx.BatchNorm"][0], _norm_of_haiku, _norm_of_equinox],
    ids=["linen", "nnx", "haiku", "equinox"],
)
def test_batches_of_random_keys(call):
    with pytest.raises(TypeError, match=r"^jaxgrad\.nn\.\w+\.BatchNorm: \w+ must be an array of numbers, got key<fry>"):
        call(jax.random.split(KEY, (B, I)))
