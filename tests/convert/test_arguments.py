"""Arguments that are not among the weights: each converter checks them, and names those that it rejects."""

from __future__ import annotations

import re

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrad.convert import BatchNormWeights, flax, haiku, torch

NORM = {f"running_{name}": np.ones(4, np.float32) for name in ("mean", "var")}
CONV = {"weight": np.ones((4, 2, 3, 2), np.float32)}
AVERAGE = {"average": np.ones((1, 4), np.float32), "hidden": np.ones((1, 4), np.float32), "counter": np.int32(1)}
STATE = {f"batch_norm/~/{name}_ema": AVERAGE for name in ("mean", "var")}


class _Layer:
    """A layer of flax: its arguments."""

    axis, momentum, epsilon = -1, 0.9, 1e-5

    def __init__(self, **arguments):
        vars(self).update(arguments)


def _read_flax(**arguments):
    return flax.read_batch_norm({"batch_stats": {"mean": jnp.ones(4), "var": jnp.ones(4)}}, _Layer(**arguments))


NORMS = {
    "torch": (lambda **arguments: torch.read_batch_norm(NORM, **arguments), "eps", "momentum"),
    "haiku": (
        lambda **arguments: haiku.read_batch_norm({}, STATE, **{"decay_rate": 0.9, **arguments}),
        "eps",
        "decay_rate",
    ),
    "flax": (_read_flax, "epsilon", "momentum"),
}


@pytest.mark.parametrize("library", NORMS)
def test_numbers_of_batch_norm(library):
    read, epsilon, momentum = NORMS[library]
    for name, expected in ((epsilon, "a finite number of at least 0"), (momentum, r"a number in \[0, 1\]")):
        for value in (np.nan, -1e-3, np.inf, np.float32(-1)):
            with pytest.raises(ValueError, match=rf"read_batch_norm: (layer\.)?{name} must be {expected}, got"):
                read(**{name: value})
        for value in (np.array(["a"]), np.array([0.5]), np.array(True), jax.random.key(0), 0.5j, "0.5", True):
            with pytest.raises(TypeError, match=rf"read_batch_norm: (layer\.)?{name} must be {expected}, got"):
                read(**{name: value})
        for value in (np.float32(0.25), np.array(0.25), jnp.float32(0.25), jnp.bfloat16(0.25)):
            record = read(**{name: value})
            own = record.epsilon if name == epsilon else record.momentum
            expected = 0.75 if (library, name) == ("torch", momentum) else 0.25
            assert (type(own), own) == (float, expected)


def test_numbers_that_are_traced():
    with pytest.raises(TypeError, match=r"eps must be a finite number of at least 0, got .*Tracer"):
        jax.jit(lambda eps: haiku.read_batch_norm({}, STATE, decay_rate=0.9, eps=eps).mean)(1e-3)


def test_number_of_steps():
    with pytest.raises(TypeError, match="read_batch_norm: the number of steps must be an int, got"):
        torch.read_batch_norm({**NORM, "num_batches_tracked": np.array(["a"])})
    with pytest.raises(TypeError, match=r"read_batch_norm: the number of steps must be an int, got 2\.5"):
        torch.read_batch_norm({**NORM, "num_batches_tracked": 2.5})


@pytest.mark.parametrize("momentum", [0.999998, 1 - 1e-9, np.nextafter(1.0, 0.0), 1.0])
def test_statistics_that_hardly_change(momentum):
    with pytest.raises(ValueError, match=r"write_batch_norm: weights must have a momentum below 0\.9999975, got "):
        haiku.write_batch_norm(_norm_record(momentum))


@pytest.mark.parametrize("momentum", [-0.5, 1.5, np.nan])
def test_momentum_of_records(momentum):
    with pytest.raises(
        ValueError, match=r"write_batch_norm: momentum of the weights must be a number in \[0, 1\], got"
    ):
        haiku.write_batch_norm(_norm_record(momentum))


@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.9999975])
def test_counters_of_written_records(momentum):
    params, state = haiku.write_batch_norm(_norm_record(momentum))
    found = haiku.read_batch_norm(params, state, decay_rate=momentum)
    assert momentum ** float(found.steps) < 1e-17


def _norm_record(momentum):
    return BatchNormWeights(None, None, jnp.ones(4), jnp.ones(4), epsilon=1e-5, momentum=momentum)


def _state_without(entry):
    return {key: {name: value for name, value in AVERAGE.items() if name != entry} for key in STATE}


MODULES_OF_HAIKU = [
    ({}, None, TypeError, "state must be a mapping, got NoneType"),
    ({"batch_norm": np.ones(4)}, STATE, TypeError, "batch_norm of params must be a mapping, got ndarray"),
    ({"batch_norm": None}, STATE, TypeError, "batch_norm of params must be a mapping, got NoneType"),
    (
        {},
        {**STATE, "batch_norm/~/var_ema": 1.0},
        TypeError,
        "batch_norm/~/var_ema of state must be a mapping, got float",
    ),
    ({}, _state_without("counter"), ValueError, "batch_norm/~/mean_ema of state must have 'counter', got"),
    ({}, _state_without("average"), ValueError, "batch_norm/~/mean_ema of state must have 'average', got"),
    ({}, _state_without("hidden"), ValueError, "batch_norm/~/mean_ema of state must have 'hidden', got"),
    (
        {},
        {key: {**AVERAGE, "hidden": np.ones(3, np.float32)} for key in STATE},
        ValueError,
        "the arrays must all have one shape (C,), got",
    ),
]


@pytest.mark.parametrize(("params", "state", "error", "message"), MODULES_OF_HAIKU)
def test_modules_of_haiku(params, state, error, message):
    with pytest.raises(error, match=re.escape(f"read_batch_norm: {message}")):
        haiku.read_batch_norm(params, state, decay_rate=0.9)


READ_CONV = {
    "torch": (lambda **arguments: torch.read_conv(CONV, **arguments), ("stride", "dilation")),
    "torch transposed": (
        lambda **arguments: torch.read_conv_transpose(CONV, **arguments),
        ("stride", "dilation", "output_padding"),
    ),
    "haiku": (lambda **arguments: haiku.read_conv({"w": jnp.ones((3, 2, 2, 4))}, **arguments), ("stride", "rate")),
}


@pytest.mark.parametrize("library", READ_CONV)
def test_ints_of_convolutions(library):
    read, names = READ_CONV[library]
    for name in names:
        for value in (True, (1, True), b"\x01\x02", bytearray(b"\x01"), np.array(1.0), np.array(2), "12"):
            with pytest.raises(ValueError, match=rf": {name} must be an int or 2 ints, got"):
                read(**{name: value})
        with pytest.raises(ValueError, match=rf": {name} must fit into 64 bits, got 18446744073709551616"):
            read(**{name: 2**64})
        record = read(**{name: np.array([2, 3])})
        assert getattr(record, {"stride": "strides", "rate": "dilation"}.get(name, name)) == (2, 3)
    for value in (True, b"\x01\x02", (b"\x01\x02", b"\x01\x02"), 0.5, None):
        with pytest.raises(ValueError, match=": padding must be"):
            read(padding=value)
    for value in (-(2**63) - 1, 2**63):
        with pytest.raises(ValueError, match=r": padding must (be|fit)"):
            read(padding=[(value, 0), (0, 0)] if library == "haiku" else value)


def test_negative_padding_of_pytorch():
    with pytest.raises(ValueError, match=r"padding must be at least 0, got \(0, -1\)"):
        torch.read_conv(CONV, padding=(0, -1))


def test_groups():
    with pytest.raises(TypeError, match="groups must be an int, got bool"):
        torch.read_conv(CONV, groups=True)


PADDINGS = [
    hk.pad.causal,
    [hk.pad.causal, hk.pad.full, hk.pad.same],
    [hk.pad.full],
    (1, 2),
    [(1, 2)],
    ((1, 2), (0, 1), (3, 0)),
    [np.array([1, 2]), np.array([0, 1]), (3, 0)],
    lambda size: np.array([size, 0]),
]


@pytest.mark.parametrize("padding", PADDINGS)
def test_padding_of_haiku(padding):
    module = hk.without_apply_rng(
        hk.transform(lambda x: hk.Conv3D(2, (2, 3, 2), rate=(2, 1, 1), padding=padding, name="conv")(x))
    )
    x = jax.random.normal(jax.random.key(0), (1, 4, 5, 6, 3))
    params = module.init(jax.random.key(1), x)
    found = haiku.read_conv(params["conv"], rate=(2, 1, 1), padding=padding)(x)
    np.testing.assert_allclose(found, module.apply(params, x), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "padding", [2, [], [hk.pad.causal] * 2, [1.5, 2.5], lambda size: size, [None], np.array(2), np.array([1, 2])]
)
def test_padding_that_haiku_rejects(padding):
    with pytest.raises(ValueError, match="read_conv: padding must be"):
        haiku.read_conv({"w": jnp.ones((3, 2, 2, 2, 4))}, padding=padding)


H = 3
CELL_OF_TORCH = {
    **{f"weight_{side}_l0": np.ones((3 * H, H), np.float32) for side in ("ih", "hh")},
    **{f"bias_{side}_l0": np.ones(3 * H, np.float32) for side in ("ih", "hh")},
}


def test_biases_of_a_gru():
    with pytest.raises(ValueError, match=r"read_gru: bias_hh of weight_ih_l0 must have the shape \(9,\), got \(3,\)"):
        torch.read_gru({**CELL_OF_TORCH, "bias_hh_l0": np.ones(3, np.float32)})
    weights = {"w_i": np.ones((2, 3 * H), np.float32), "w_h": np.ones((H, 3 * H), np.float32)}
    with pytest.raises(ValueError, match=r"read_gru: b of a layer must have the shape \(9,\), got \(4,\)"):
        haiku.read_gru({**weights, "b": np.ones(4, np.float32)})
    nnx = {"dense_i": {"kernel": weights["w_i"], "bias": np.ones(4)}, "dense_h": {"kernel": weights["w_h"]}}
    with pytest.raises(ValueError, match=r"read_gru: bias of the cell must have the shape \(9,\), got \(4,\)"):
        flax.read_gru(nnx)
    with pytest.raises(ValueError, match=r"read_gru: a layer must have the parameter dense_h\.kernel of a GRUCell"):
        flax.read_gru({**nnx, "dense_h": {}})
    for missing in ("bias_ih_l0", "bias_hh_l0"):
        with pytest.raises(ValueError, match=f"read_gru: state_dict has no {missing};"):
            torch.read_gru({name: array for name, array in CELL_OF_TORCH.items() if name != missing})


def _linen_cell(**arrays):
    cell = {side + gate: {"kernel": np.ones((H, H), np.float32)} for side in "ih" for gate in "zrn"}
    for name in ("iz", "ir", "in", "hn"):
        cell[name]["bias"] = np.ones(H, np.float32)
    for name, array in arrays.items():
        dense, parameter = name.split("_")
        cell[dense][parameter] = array
    return cell


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"iz_bias": np.ones(2), "in_bias": np.ones(4)},
            r"iz\.bias of the cell must have the shape \[H\] = \(3,\), got \(2,\)",
        ),
        ({"ir_bias": np.ones(())}, r"ir\.bias of the cell must have rank 1, \[H\] = \(3,\), got rank 0, \(\)"),
        ({"hn_bias": np.ones(2)}, r"hn\.bias of the cell must have the shape \[H\] = \(3,\), got \(2,\)"),
        (
            {"hz_kernel": np.ones((H, 2)), "hn_kernel": np.ones((H, 4))},
            r"hz\.kernel of the cell must have the shape \[H, H\] = \(3, 3\), got \(3, 2\)",
        ),
        (
            {"ir_kernel": np.ones((2, H))},
            r"ir\.kernel of the cell must have the shape \[I, H\] = \(3, 3\), got \(2, 3\)",
        ),
        ({"iz_kernel": np.ones(H)}, r"iz\.kernel of the cell must have rank 2, \[I, H\], got rank 1, \(3,\)"),
        ({"hz_kernel": np.ones(())}, r"hz\.kernel of the cell must have rank 2, \[H, H\], got rank 0, \(\)"),
    ],
)
def test_gates_of_linen_that_do_not_fit(arrays, message):
    assert len(flax.read_gru(_linen_cell())) == 1
    with pytest.raises(ValueError, match=f"read_gru: {message}"):
        flax.read_gru(_linen_cell(**{name: array.astype(np.float32) for name, array in arrays.items()}))


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64", "longdouble"])
def test_arrays_that_are_not_floating(dtype):
    of_numpy = np.ones((4, 2, 3), dtype)
    for array in (of_numpy,) if dtype == "longdouble" else (of_numpy, jnp.asarray(of_numpy)):
        with pytest.raises(TypeError, match=r"read_conv: weight must be a floating-point array, got .* of \w+"):
            torch.read_conv({"weight": array})


def test_arrays_that_cannot_be_read():
    class Tensor:  # such as one of PyTorch without data
        dtype = "torch.float32"

        def detach(self):
            raise NotImplementedError("Cannot copy out of meta tensor; no data!")

    for value in (Tensor(), [[1.0], [1.0, 2.0]]):
        with pytest.raises(TypeError, match="read_conv: weight must be a floating-point array, got"):
            torch.read_conv({"weight": value})
