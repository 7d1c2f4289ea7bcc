"""Forward mode of every op, inside `forward_mode()` and with `jaxgrad.jvp`, against plain JAX in float64."""

from __future__ import annotations

import dataclasses
import re
import traceback
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import batch_norm_references
import gru_references
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import CPU_KERNEL, CUDA, XLA, XLA_ON_GPU
from conv_references import with_bias
from jax import lax
from pool_cases import PoolCase
from thorough import oldest_one_in, one_in
from tolerances import DTYPES, assert_close, tolerance

import jaxgrad

pytestmark = pytest.mark.jax_version

BACKENDS = (XLA, XLA_ON_GPU)


@dataclasses.dataclass(frozen=True)
class OpCase:
    """One call of an op, as a function of the differentiated arrays.

    Attributes:
      op: function of the arrays and `implementation`.
      reference: the op in plain JAX.
      shapes: shapes of the arrays.
      one: position of the array that tests with a single array differentiate.
      tangent_kernels: number of calls of each kernel for the value and a tangent along all arrays.
      gradient_kernels: number of calls of each kernel for the value and the gradients of all arrays.
    """

    op: Callable[..., Any]
    reference: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    one: int
    tangent_kernels: dict[str, int]
    gradient_kernels: dict[str, int]


_CONV = {
    "window_strides": (2, 1),
    "padding": ((1, 0), (2, 1)),
    "rhs_dilation": (1, 2),
    "dimension_numbers": ("NHWC", "HWIO", "NHWC"),
    "feature_group_count": 2,
}
_DEPTHWISE = {**_CONV, "window_strides": (1, 1), "feature_group_count": 8}
_TRANSPOSED = {"strides": (2, 3), "padding": "SAME"}
_TRAINING = {"feature_axis": 1, "epsilon": 3e-3, "activation": "relu"}
_INFERENCE = {"feature_axis": -1, "epsilon": 3e-3}
_GRU = {"direction": "reverse", "linear_before_reset": True, "clip": None}
_POOL = PoolCase()
_LENGTHS = np.array([2, 1, 2], np.int32)
_RESET = np.array([[1, 0, 0], [0, 1, 1]], bool)  # between two steps, past the length, and before the first step


def _conv(lhs, rhs, bias, **kwargs):
    return jaxgrad.conv_general_dilated(lhs, rhs, **_CONV, bias=bias, activation="relu", **kwargs)


def _conv_reference(lhs, rhs, bias):
    return jax.nn.relu(with_bias(partial(lax.conv_general_dilated, **_CONV), 3)(lhs, rhs, bias))


def _depthwise(lhs, rhs, bias, **kwargs):
    return jaxgrad.conv_general_dilated(lhs, rhs, **_DEPTHWISE, bias=bias, **kwargs)


def _conv_transpose(lhs, rhs, bias, **kwargs):
    return jaxgrad.conv_transpose(lhs, rhs, **_TRANSPOSED, bias=bias, **kwargs)


def _training(x, scale, bias, residual, **kwargs):
    return jaxgrad.batch_norm_training(x, scale, bias, residual=residual, **_TRAINING, **kwargs)


def _training_reference(*arrays):
    return tuple(batch_norm_references.plain_training(*arrays, **_TRAINING))


def _gru(x, w, r, b, initial_h, reset_h, **kwargs):
    return jaxgrad.gru(x, w, r, b, _LENGTHS, initial_h, reset=_RESET, reset_h=reset_h, **_GRU, **kwargs)


def _gru_reference(x, w, r, b, initial_h, reset_h):
    return gru_references.forward(x, w, r, b, _LENGTHS, initial_h, _RESET, reset_h, **_GRU)


def _max_pool(x, scale, **kwargs):
    return _POOL.op(**kwargs)(x * scale)


def _avg_pool(x, scale, **kwargs):
    return jaxgrad.avg_pool(x * scale, **_POOL.op().keywords, count_include_pad=False, **kwargs)


CASES = {
    "conv_general_dilated": OpCase(
        _conv,
        _conv_reference,
        ((2, 5, 4, 4), (3, 2, 2, 6), (6,)),
        1,
        {"onednn_conv_forward": 3},
        {"onednn_conv_forward": 1, "onednn_conv_input_gradient": 1, "onednn_conv_weight_gradient": 1},
    ),
    "conv_transpose": OpCase(
        _conv_transpose,
        with_bias(partial(lax.conv_transpose, **_TRANSPOSED), 3),
        ((2, 3, 2, 3), (3, 2, 3, 4), (4,)),
        1,
        {"onednn_conv_input_gradient": 3},
        {"onednn_conv_input_gradient": 1, "onednn_conv_forward": 1, "onednn_conv_weight_gradient": 1},
    ),
    "batch_norm_training": OpCase(
        _training,
        _training_reference,
        ((3, 4, 2), (4,), (4,), (3, 4, 2)),
        1,
        {"cpu_norm_forward": 1, "cpu_norm_normalize": 1, "cpu_norm_backward": 1},
        {"cpu_norm_forward": 1, "cpu_norm_backward": 1},
    ),
    "batch_norm_inference": OpCase(
        lambda x, scale, bias, mean, root, **kwargs: jaxgrad.batch_norm_inference(
            x, scale, bias, mean, root**2 + 0.3, **_INFERENCE, **kwargs
        ),
        lambda x, scale, bias, mean, root: batch_norm_references.plain_inference(
            x, scale, bias, mean, root**2 + 0.3, **_INFERENCE
        ),
        ((3, 2, 4), (4,), (4,), (4,), (4,)),
        4,
        {"cpu_norm_normalize": 2, "cpu_norm_backward": 1},
        {"cpu_norm_normalize": 1, "cpu_norm_backward": 1},
    ),
    "gru": OpCase(
        _gru,
        _gru_reference,
        ((2, 3, 4), (1, 6, 4), (1, 6, 2), (1, 12), (1, 3, 2), (1, 3, 2)),
        2,
        {"cpu_gru_forward": 1},
        {"cpu_gru_forward": 1, "cpu_gru_backward": 1},
    ),
    "max_pool": OpCase(
        _max_pool,
        lambda x, scale: _POOL.lax(x * scale),
        (_POOL.shape, (_POOL.channels,)),
        1,
        {"cpu_max_pool_forward": 1, "cpu_max_pool_tangent": 1},
        {"cpu_max_pool_forward": 1, "cpu_max_pool_input_gradient": 1},
    ),
    "avg_pool": OpCase(
        _avg_pool,
        lambda x, scale: _POOL.lax_mean(x * scale, count_include_pad=False),
        (_POOL.shape, (_POOL.channels,)),
        1,
        {"cpu_sum_pool_forward": 2},
        {"cpu_sum_pool_forward": 1, "cpu_sum_pool_input_gradient": 1},
    ),
    "depthwise": OpCase(
        _depthwise,
        with_bias(partial(lax.conv_general_dilated, **_DEPTHWISE), 3),
        ((2, 6, 5, 8), (3, 2, 1, 8), (8,)),
        1,
        {"cpu_depthwise_forward": 3},
        {"cpu_depthwise_forward": 1, "cpu_depthwise_input_gradient": 1, "cpu_depthwise_weight_gradient": 1},
    ),
}


def _on_cpu(name: str) -> str:
    """The implementation of the CPU handlers."""
    return "onednn" if name.startswith("conv") else "cpu"


every_op = pytest.mark.parametrize("name", oldest_one_in(2, [name for name in CASES if name != "depthwise"]))


def _arrays(name: str, dtype: str, seed: int = 0) -> list[np.ndarray]:
    """Random arrays, rounded to float32 in every dtype, so that one reference serves all dtypes."""
    rng = np.random.default_rng([seed, *map(ord, name)])
    return [rng.normal(0.3, 0.8, s).astype(np.float32).astype(DTYPES[dtype]) for s in CASES[name].shapes]


def _loss(op: Callable[..., Any]) -> Callable[..., Any]:
    def loss(*arrays):
        return sum(jnp.sum(jnp.sin(y + i)) for i, y in enumerate(jax.tree.leaves(op(*arrays))))

    return loss


def _gradient_of(loss):
    return lambda *arrays: jax.grad(loss, tuple(range(len(arrays))))(*arrays)


def _gradient(op):
    return _gradient_of(_loss(op))


def _slope(op, tangents):
    """The derivative of the loss along the tangents, as a function of the arrays."""
    return lambda *arrays: jax.jvp(_loss(op), arrays, tuple(tangents))[1]


def _of_one(op, case: OpCase, arrays):
    """`op` as a function of one array."""
    return lambda a: op(*arrays[: case.one], a, *arrays[case.one + 1 :])


def _scan(f, a):
    """The op in the body of a loop that starts at `a`."""
    return lax.scan(lambda c, _: (c * 1.1, jax.tree.leaves(f(c))[0]), a, None, length=2)


def _vmap_both(op, arrays, tangents, one):
    """The derivative of a `vmap` over all arrays but one, whose tangent is shared by the independent problems."""

    def batch(values):
        return [v if i == one else jnp.stack([v, -v]) for i, v in enumerate(values)]

    axes = [None if i == one else 0 for i in range(len(arrays))]
    return jax.jvp(jax.vmap(op, axes), batch(arrays), batch(tangents))


# name: function(op, case, arrays, tangents)
TRANSFORMATIONS: dict[str, Callable[..., Any]] = {
    "jvp": lambda op, case, at, to: jax.jvp(op, at, to),
    "jacfwd": lambda op, case, at, to: jax.jacfwd(_of_one(op, case, at))(at[case.one]),
    "forward_over_reverse": lambda op, case, at, to: jax.jvp(_gradient(op), at, to),
    "reverse_over_forward": lambda op, case, at, to: _gradient_of(_slope(op, to))(*at),
    "forward_over_forward": lambda op, case, at, to: jax.jvp(_slope(op, to), at, to),
    "hessian": lambda op, case, at, to: jax.hessian(_of_one(_loss(op), case, at))(at[case.one]),
    "vmap_of_jvp": lambda op, case, at, to: jax.vmap(
        lambda t: jax.jvp(_of_one(op, case, at), [at[case.one]], [t])[1], 1, 1
    )(jnp.stack([to[case.one], at[case.one]], 1)),
    "jvp_of_vmap": lambda op, case, at, to: _vmap_both(op, at, to, case.one),
    "gradient_of_vmap": lambda op, case, at, to: _gradient(lambda *a: _vmap_both(op, a, to, case.one)[0])(*at),
    "jvp_in_scan": lambda op, case, at, to: jax.jvp(
        partial(_scan, _of_one(op, case, at)), [at[case.one]], [to[case.one]]
    ),
}


@cache
def _reference(name: str, transformation: str) -> Callable[..., Any]:
    return jax.jit(partial(TRANSFORMATIONS[transformation], CASES[name].reference, CASES[name]))


@cache
def _expected(name: str, transformation: str) -> Any:
    at, to = _arrays(name, "float64"), _arrays(name, "float64", 1)
    if transformation in (
        "reverse_over_forward",
        "forward_over_forward",
    ):  # parts of the result of another transformation
        gradient, product = _expected(name, "forward_over_reverse")
        if transformation == "reverse_over_forward":
            return product
        return [sum(np.vdot(a, t) for a, t in zip(arrays, to, strict=True)) for arrays in (gradient, product)]
    with jax.default_device(jax.devices("cpu")[0]):
        return jax.tree.map(np.asarray, _reference(name, transformation)(at, to))


def _assert_same(found: Any, expected: Any, dtype: str, terms: int = 60) -> None:
    for actual, desired in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_close(actual, desired, dtype=dtype, terms=terms)


def _check(name: str, transformation: str, dtype: str, implementation: str | None, put: Callable[..., Any]) -> None:
    case = CASES[name]
    op = partial(case.op, implementation=implementation)
    at, to = put((_arrays(name, dtype), _arrays(name, dtype, 1)))
    with jaxgrad.forward_mode():
        found = jax.jit(partial(TRANSFORMATIONS[transformation], op, case))(at, to)
    _assert_same(found, _expected(name, transformation), dtype)


@every_op
@pytest.mark.parametrize("transformation", one_in(2, TRANSFORMATIONS))
def test_transformations(name, transformation):
    _check(name, transformation, "float32", _on_cpu(name), CPU_KERNEL.put)


@every_op
def test_linearize(name):
    op, at, to = (
        partial(CASES[name].op, implementation=_on_cpu(name)),
        _arrays(name, "float32"),
        _arrays(name, "float32", 1),
    )
    with jaxgrad.forward_mode():
        value, tangent = jax.linearize(jax.jit(op), *at)
    _assert_same((value, jax.jit(tangent)(*to)), _expected(name, "jvp"), "float32")


@every_op
@pytest.mark.parametrize("transformation", ["jvp", "forward_over_reverse"])
def test_on_xla(backend, name, transformation):
    _check(name, transformation, "float32", backend.implementation, backend.put)


@every_op
@pytest.mark.parametrize("transformation", ["jvp", "forward_over_reverse"])
def test_float64(name, transformation):
    _check(name, transformation, "float64", None, CPU_KERNEL.put)


@every_op
def test_jvp_needs_no_switch(name):
    """`jaxgrad.jvp` works without `forward_mode()`, also for a function that was compiled before."""
    op = jax.jit(partial(CASES[name].op, implementation=_on_cpu(name)))
    at, to = CPU_KERNEL.put((_arrays(name, "float32"), _arrays(name, "float32", 1)))
    value = op(*at)
    found = jaxgrad.jvp(op, at, to)
    _assert_same(found, _expected(name, "jvp"), "float32")
    _assert_same(found[0], value, "float32", terms=0)
    with_aux = jaxgrad.jvp(lambda *a: (op(*a), a[0]), at, to, has_aux=True)
    _assert_same(with_aux, (*found, at[0]), "float32", terms=0)


@every_op
def test_gradients_are_those_without_the_switch(name):
    op = partial(CASES[name].op, implementation=_on_cpu(name))
    at = CPU_KERNEL.put(_arrays(name, "float32"))
    expected = jax.jit(_gradient(op))(*at)
    with jaxgrad.forward_mode():
        found = jax.jit(lambda *a: (_gradient(op)(*a), _gradient(jax.checkpoint(op))(*a)))(*at)
    for actual, again, desired in zip(*found, expected, strict=True):
        np.testing.assert_array_equal(actual, desired)
        np.testing.assert_array_equal(again, desired)


@every_op
def test_a_gradient_of_one_of_several_gradients(name):
    """Columns of the Hessian along one array: reverse mode matches forward over reverse."""
    case = CASES[name]
    op = partial(case.op, implementation=_on_cpu(name))
    at, to = CPU_KERNEL.put((_arrays(name, "float32"), _arrays(name, "float32", 1)))

    def along_one(*arrays):
        return jnp.vdot(_gradient(op)(*arrays)[case.one], to[case.one])

    with jaxgrad.forward_mode():
        found = jax.jit(_gradient_of(along_one))(*at)
    directions = [t if i == case.one else 0 * t for i, t in enumerate(_arrays(name, "float64", 1))]
    _, expected = _reference(name, "forward_over_reverse")(_arrays(name, "float64"), directions)
    _assert_same(found, expected, "float32")


@every_op
def test_jvp_without_jit(name):
    op, at, to = (
        partial(CASES[name].op, implementation=_on_cpu(name)),
        _arrays(name, "float32"),
        _arrays(name, "float32", 1),
    )
    with jaxgrad.forward_mode():
        _assert_same(jax.jvp(op, at, to), _expected(name, "jvp"), "float32")


@pytest.mark.parametrize("transformation", ["jvp", "forward_over_reverse", "jvp_of_vmap"])
@pytest.mark.parametrize("kernel", [CPU_KERNEL, pytest.param(CUDA, marks=pytest.mark.gpu)], ids=str)
def test_depthwise_convolutions(kernel, transformation):
    _check("depthwise", transformation, "float32", kernel.implementation, kernel.put)


def _kernels(function: Callable[..., Any], *arrays: Any) -> Counter[str]:
    """Number of calls of each kernel in the compiled program."""
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    with jaxgrad.forward_mode():
        text = jax.jit(function, compiler_options=options).lower(*arrays).compile().as_text()
    return Counter(re.findall(r'custom_call_target="jaxgrad_(\w+)"', text))


@pytest.mark.parametrize("name", CASES)
def test_kernels_in_the_program(name):
    """`forward_mode()` adds no kernel call to reverse mode, and forward mode runs only the kernels of the tangent."""
    case = CASES[name]
    op = partial(case.op, implementation=_on_cpu(name))
    at, to = CPU_KERNEL.put((_arrays(name, "float32"), _arrays(name, "float32", 1)))
    assert _kernels(lambda at, to: jax.jvp(op, at, to), at, to) == case.tangent_kernels
    assert _kernels(lambda at: _gradient(op)(*at), at) == case.gradient_kernels


@every_op
def test_bfloat16(name):
    case, dtype = CASES[name], "bfloat16"
    op = partial(case.op, implementation=_on_cpu(name))
    at, to = (_arrays(name, dtype, seed) for seed in (0, 1))
    found = jaxgrad.jvp(jax.jit(op), at, to)
    wide = [[np.asarray(a, np.float64) for a in arrays] for arrays in (at, to)]
    expected = _reference(name, "jvp")(*wide)
    for actual, desired in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        # A sum of up to three tangents, each rounded: three times the tolerance of one result.
        atol = 3 * tolerance(dtype, desired, 0)
        np.testing.assert_allclose(np.asarray(actual, np.float64), desired, rtol=0, atol=atol)
    with jaxgrad.forward_mode():
        values = jax.jit(op)(*at)
    assert [v.dtype for v in jax.tree.leaves(found[1])] == [v.dtype for v in jax.tree.leaves(values)]


def test_the_switch_ends_with_its_block():
    at = _arrays("batch_norm_training", "float32")
    op = jax.jit(CASES["batch_norm_training"].op)
    with jaxgrad.forward_mode():
        jax.jvp(op, at, at)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(op, at, at)


@every_op
@pytest.mark.parametrize(
    "differentiate",
    [
        lambda op, at: jax.jvp(op, at, at),
        lambda op, at: jax.jit(lambda at: jax.jvp(op, at, at))(at),
        lambda op, at: jax.jvp(jax.jit(op), at, at),
        lambda op, at: jax.linearize(op, *at)[1](*at),
    ],
    ids=["jvp", "jvp inside jit", "jvp of jit", "linearize"],
)
def test_error_without_the_switch_names_it(name, differentiate):
    op, at = partial(CASES[name].op, implementation=_on_cpu(name)), _arrays(name, "float32")
    with pytest.raises(TypeError, match="forward-mode") as caught:
        differentiate(op, at)
    assert "jaxgrad.forward_mode()" in "".join(traceback.format_exception(caught.value))


def test_a_product_with_the_hessian_of_clipped_gates():
    """With rows of several lengths and resets; the reference is a hand-written gradient."""
    rng = np.random.default_rng(4)
    shapes = (3, 3, 2), (1, 6, 2), (1, 6, 2), (1, 12), (1, 3, 2), (1, 3, 2)
    reset = np.array([[0, 1, 0], [1, 0, 1], [0, 1, 0]], bool)
    at, to = ([rng.normal(0, 1, s).astype(np.float32).astype(np.float64) for s in shapes] for _ in range(2))
    settings = {"direction": "reverse", "linear_before_reset": False, "clip": 0.7}

    def op(x, w, r, b, initial_h, reset_h):
        return CPU_KERNEL.gru(x, w, r, b, _LENGTHS + 1, initial_h, reset, reset_h, **settings)

    def reference(x, w, r, b, initial_h, reset_h):
        return gru_references.forward(x, w, r, b, _LENGTHS + 1, initial_h, reset, reset_h, **settings)

    found, expected = (jax.jit(partial(jaxgrad.jvp, _gradient(f)))(*CPU_KERNEL.put((at, to))) for f in (op, reference))
    _assert_same(found, expected, "float64")


def test_a_tangent_along_a_bias_alone_runs_no_convolution():
    """Without an activation, whose tangent depends on the value."""
    lhs, rhs, bias = CPU_KERNEL.put(_arrays("conv_general_dilated", "float32"))
    op = partial(jaxgrad.conv_general_dilated, **_CONV, implementation="onednn")

    def tangent(lhs, rhs, bias):
        return jax.jvp(lambda b: op(lhs, rhs, bias=b), [bias], [2 * bias])[1]

    assert not _kernels(tangent, lhs, rhs, bias)
    with jaxgrad.forward_mode():
        found = jax.jit(tangent)(lhs, rhs, bias)
    np.testing.assert_array_equal(found, np.broadcast_to(2 * bias, found.shape))
