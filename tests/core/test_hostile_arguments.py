"""Whatever an argument is, the op takes it or raises TypeError or ValueError with its own name."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgrad

_KEY = jax.random.key(0)
_VALUES = {
    "key": _KEY,
    "keys": jax.random.split(_KEY),
    "keys in pairs": ((_KEY, 1), (0, 0)),
    "three keys": (_KEY,) * 3,
    "NaN": float("nan"),
    "huge int": 2**200,
    "huge and 1": (2**62, 1),
    "huge twice": (2**63 - 1,) * 2,
    "huge pairs": ((2**61, 0), (-(2**61), 0)),
    "text": "text",
    "surrogate": "\ud800",
    "bytes": b"text",
    "none inside": (None, 1),
    "nested": [[1, 2], [3]],
    "no elements": [],
    "mapping": {"a": 1},
    "objects": np.array([1, None, "a"], object),
    "0-d array": np.array(1),
    "array": jnp.ones(2),
    "function": len,
}


def _ones(*shape):
    return np.ones(shape, np.float32)


_CONV = _ones(2, 6, 5, 4), _ones(8, 6, 3, 2), (1, 1), "SAME"
_CONV_TRANSPOSE = _ones(2, 5, 4, 6), _ones(3, 2, 6, 8), (1, 1), "SAME"
_CALLS = {
    "conv_general_dilated": dict(zip(("lhs", "rhs", "window_strides", "padding"), _CONV, strict=True)),
    "conv_transpose": dict(zip(("lhs", "rhs", "strides", "padding"), _CONV_TRANSPOSE, strict=True)),
    "batch_norm_training": {"x": _ones(4, 3), "scale": _ones(3), "bias": _ones(3)},
    "batch_norm_inference": {"x": _ones(4, 3), **dict.fromkeys(("scale", "bias", "mean", "var"), _ones(3))},
    "gru": {"x": _ones(5, 2, 3), "w": _ones(1, 12, 3), "r": _ones(1, 12, 4)},
    "avg_pool": {"inputs": _ones(2, 6, 5, 3), "window_shape": (2, 2)},
    "max_pool": {"inputs": _ones(2, 6, 5, 3), "window_shape": (2, 2)},
}
_ARGUMENTS = {
    "conv_general_dilated": "window_strides padding lhs_dilation rhs_dilation dimension_numbers feature_group_count "
    "batch_group_count precision preferred_element_type out_sharding activation implementation",
    "conv_transpose": "strides padding rhs_dilation dimension_numbers transpose_kernel precision feature_group_count "
    "preferred_element_type use_consistent_padding activation output_padding implementation",
    "batch_norm_training": "feature_axis epsilon activation statistics_dtype axis_name axis_index_groups "
    "implementation",
    "batch_norm_inference": "feature_axis epsilon implementation",
    "avg_pool": "window_shape strides padding count_include_pad window_dilation feature_axis implementation",
    "max_pool": "window_shape strides padding window_dilation feature_axis implementation",
    "gru": "sequence_lens direction linear_before_reset clip time_major remat_every implementation",
}
_every_argument = pytest.mark.parametrize(
    ("op", "argument"), [(op, argument) for op, names in _ARGUMENTS.items() for argument in names.split()]
)


def _check(op, argument, value, what):
    """Traces the call, which has the other arguments of an ordinary one."""
    message = ""
    try:
        jax.eval_shape(lambda: getattr(jaxgrad, op)(**{**_CALLS[op], argument: value}))
    except (TypeError, ValueError) as error:
        message = str(error)
    assert not message or message.startswith(f"jaxgrad.{op}: "), what


@_every_argument
def test_a_hostile_value(op, argument):
    for name, value in _VALUES.items():
        _check(op, argument, value, name)


@_every_argument
def test_a_traced_value(op, argument):
    for value in (_KEY, np.float32(1), jnp.ones(2, int)):
        jax.eval_shape(lambda value: _check(op, argument, value, "traced"), value)


@pytest.mark.parametrize(
    ("op", "settings", "message"),
    [
        ("conv_general_dilated", {"padding": _KEY}, "padding must be a string or pairs of ints, got PRNGKeyArray"),
        ("conv_transpose", {"padding": np.array(1)}, "padding must be 'SAME', 'VALID' or 2 pairs, got ndarray"),
        ("conv_transpose", {"precision": _KEY}, "Precision argument must be one of"),
        (
            "conv_transpose",
            {"strides": (2**62, 1)},
            "sizes that the arguments make must fit into 63 bits: the result has the shape",
        ),
        ("conv_transpose", {"output_padding": (_KEY, 1)}, "each element of output_padding must be an int, got PRNGKey"),
        ("conv_general_dilated", {"window_strides": _VALUES["keys"]}, "window_strides must be a sequence of ints, got"),
        (
            "conv_general_dilated",
            {"out_sharding": [1]},
            "out_sharding must be a NamedSharding, a PartitionSpec or None",
        ),
        ("batch_norm_training", {"axis_name": [1, 2]}, "axis_name must name axes of the enclosing"),
        ("batch_norm_training", {"statistics_dtype": _KEY}, "statistics_dtype must be a dtype or None, got Array"),
        ("gru", {"sequence_lens": _VALUES["keys"]}, "sequence_lens must be an array"),
    ],
    ids=str,
)
def test_the_error_names_the_argument(op, settings, message):
    with pytest.raises((TypeError, ValueError), match=rf"jaxgrad.{op}: {re.escape(message)}"):
        getattr(jaxgrad, op)(**{**_CALLS[op], **settings})


@pytest.mark.parametrize(
    "groups",
    [3, "ab", [0, 1], [["a", "b"]], [[0.5], [1]], [[0], [1, 2]], _KEY, np.array(3), [[]], [[7]], [[0, 0]]],
)
def test_groups_of_an_axis(groups):
    """Of a mesh, inside `shard_map`: elsewhere they are refused before."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")

    def normalize(x):
        return jaxgrad.batch_norm_training(
            x, jnp.ones(3, x.dtype), jnp.ones(3, x.dtype), axis_name="d", axis_index_groups=groups
        )[0]

    with pytest.raises((TypeError, ValueError), match=r"^jaxgrad.batch_norm_training: .*axis_index_groups must be"):
        jax.eval_shape(jax.shard_map(normalize, mesh=mesh, in_specs=spec, out_specs=spec), _ones(4, 3))
