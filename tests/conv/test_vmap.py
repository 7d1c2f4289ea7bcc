"""`vmap` over every subset of the operands, against a Python loop; per-example gradients in one call."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import CONVOLUTION, CPU_KERNEL, CUDA, ONEDNN, Backend
from conv_cases import FIELDS, ConvCase, ConvInputs, make_conv_inputs
from conv_running import PASSES, compiled_calls, conv, conv_transpose
from conv_transpose_cases import TransposeCase, make_transpose_inputs

from jaxgrad._src.conv.call.geometry import ConvGeometry
from jaxgrad._src.conv.call.problem import forward_problem
from jaxgrad._src.run.batching import fold

BACKENDS = CONVOLUTION

SUBSETS = [names for n in range(1, 4) for names in itertools.combinations(FIELDS, n)]
N = 3  # independent problems
SIZES = {"spatial": (5, 6), "window": (2, 3), "features": 2, "out_features": 4}
CASES = {
    "plain": ConvCase(**SIZES, strides=(2, 1), padding=((1, 0), (0, 2))),
    "last": ConvCase(**SIZES, padding="SAME", layout=("NHWC", "HWIO", "NHWC")),
    "groups": ConvCase(**SIZES, groups=2, rhs_dilation=(2, 1), layout=("HNWC", "OHIW", "CWHN")),
    "depthwise": ConvCase(**{**SIZES, "features": 1, "out_features": 2}, groups=3, padding="SAME"),
    "transposed": TransposeCase(**SIZES, strides=(2, 1)),
    "transposed_groups": TransposeCase(**SIZES, strides=(2, 1), groups=2, transpose_kernel=True),
}


def _op_and_draw(backend, case):
    if isinstance(case, TransposeCase):
        return conv_transpose(backend, **case.settings), make_transpose_inputs
    return conv(backend, **case.settings), make_conv_inputs


def _stacked_inputs(case, make, names, n=N):
    """Inputs with a leading axis of n on the named arrays, and their `in_axes`."""
    drawn = [make(case.replace(seed=seed)) for seed in range(n)]
    stacked = {name: np.stack([getattr(one, name) for one in drawn]) for name in names}
    return drawn[0]._replace(**stacked), ConvInputs(*(0 if name in names else None for name in FIELDS))


def _problem(inputs, in_axes, i):
    return ConvInputs(*(a if axis is None else a[i] for a, axis in zip(inputs, in_axes, strict=True)))


def _results(op, *inputs):
    """The value, and the gradients of a loss with a different weight for each element."""

    def loss(inputs):
        y = op(*inputs)
        return jnp.vdot(jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape), y) + jnp.sum(y**2) / 10, y

    gradients, y = jax.grad(loss, has_aux=True)(ConvInputs(*inputs))
    return y, *gradients


def _jit(function):
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def _close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * max(1.0, np.abs(expected).max()))


def _compare(mapped, single, inputs, in_axes, n=N):
    for i in range(n):
        jax.tree.map(lambda a, b, i=i: _close(a[i], b), mapped, single(*_problem(inputs, in_axes, i)))


@pytest.mark.parametrize("names", SUBSETS, ids="-".join)
@pytest.mark.parametrize("kind", CASES)
def test_every_subset_of_mapped_operands(backend, kind, names):
    case = CASES[kind]
    if backend.implementation == "xla" and case.groups == 1 and len(names) > 1:
        pytest.skip("plain jax.lax, batched by JAX")
    op, make = _op_and_draw(backend, case)
    inputs, in_axes = _stacked_inputs(case, make, names)
    inputs = ConvInputs(*backend.put(tuple(inputs)))
    mapped = _jit(jax.vmap(partial(_results, op), in_axes=tuple(in_axes)))(*inputs)
    _compare(mapped, _single(backend, kind), inputs, in_axes)


@pytest.mark.parametrize("names", [("lhs",), ("rhs",), FIELDS], ids="-".join)
@pytest.mark.parametrize("kernel", [CPU_KERNEL, pytest.param(CUDA, marks=pytest.mark.gpu)], ids=str)
def test_depthwise_kernels(kernel, names):
    """With a channel multiplier of 1, all three passes run on jaxgrad's own kernels."""
    case = ConvCase(
        **{**SIZES, "features": 1, "out_features": 1}, groups=6, padding="SAME", layout=CASES["last"].layout
    )
    op, make = _op_and_draw(kernel, case)
    inputs, in_axes = _stacked_inputs(case, make, names)
    inputs = ConvInputs(*kernel.put(tuple(inputs)))
    mapped, single = _jit(jax.vmap(partial(_results, op), in_axes=tuple(in_axes))), _jit(partial(_results, op))
    text = mapped.lower(*inputs).as_text()
    for name in PASSES:
        assert f"@jaxgrad_{kernel.implementation}_depthwise_{name}" in text
    _compare(mapped(*inputs), single, inputs, in_axes)


_compiled = {}


def _single(backend, kind):
    key = (backend, kind)
    if key not in _compiled:
        _compiled[key] = _jit(partial(_results, _op_and_draw(backend, CASES[kind])[0]))
    return _compiled[key]


@pytest.mark.parametrize("kind", ["plain", "groups", "transposed"])
@pytest.mark.parametrize("inner", FIELDS)
def test_nested_vmap(backend, kind, inner):
    """Two mapped axes: the outer on lhs, the inner on any operand."""
    case = CASES[kind]
    op, make = _op_and_draw(backend, case)
    inputs, outer_axes = _stacked_inputs(case, make, ("lhs",))
    values = np.stack([getattr(make(case.replace(seed=9 + i)), inner) for i in range(2)])
    values = np.stack([inputs.lhs, inputs.lhs[::-1]], 1) if inner == "lhs" else values
    inputs = ConvInputs(*backend.put(tuple(inputs._replace(**{inner: values}))))
    inner_axes = ConvInputs(*(0 if name == inner else None for name in FIELDS))
    results = partial(_results, op)
    mapped = _jit(jax.vmap(jax.vmap(results, in_axes=tuple(inner_axes)), in_axes=tuple(outer_axes)))(*inputs)
    for i, j in itertools.product(range(N), range(2)):
        one = _problem(_problem(inputs, outer_axes, i), inner_axes, j)
        jax.tree.map(lambda a, b, i=i, j=j: _close(a[i, j], b), mapped, _single(backend, kind)(*one))


def test_other_axes_than_the_first(backend):
    case = CASES["last"]
    op, make = _op_and_draw(backend, case)
    inputs, _ = _stacked_inputs(case, make, ("lhs", "rhs"))
    lhs, rhs = backend.put((np.moveaxis(inputs.lhs, 0, 2), np.moveaxis(inputs.rhs, 0, 4)))
    y = jax.vmap(op, in_axes=(2, -1, None), out_axes=3)(lhs, rhs, inputs.bias)
    for i in range(N):
        _close(y[:, :, :, i], op(inputs.lhs[i], inputs.rhs[i], inputs.bias))


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("name", ["lhs", "rhs"])
def test_mapped_axis_of_size_zero_and_one(backend, size, name):
    case = CASES["plain"]
    op, make = _op_and_draw(backend, case)
    inputs, in_axes = _stacked_inputs(case, make, (name,), 1)
    inputs = ConvInputs(*backend.put(tuple(inputs._replace(**{name: getattr(inputs, name)[:size]}))))
    y, *gradients = _jit(jax.vmap(partial(_results, op), in_axes=tuple(in_axes)))(*inputs)
    alone = jax.eval_shape(partial(_results, op), *_problem(*_stacked_inputs(case, make, (name,), 1), 0))
    assert y.shape == (size, *alone[0].shape)
    assert [g.shape for g in gradients] == [(size, *a.shape) for a in alone[1:]]


def _loss(op, others, rhs, lhs):
    return jnp.sum(jnp.sin(op(lhs[None], rhs, *others)))


@pytest.mark.parametrize("kind", ["plain", "last", "depthwise"])
@pytest.mark.parametrize("implementation", ["onednn", None])
def test_per_example_gradients_are_one_call_of_each_kernel(kind, implementation):
    """`vmap(grad)` with only lhs mapped: one weight gradient per problem, in one call."""
    case = CASES[kind].replace(batch=5, spatial=(15, 16))  # enough work for oneDNN to be selected
    op, make = _op_and_draw(Backend(implementation, "cpu"), case)
    inputs = make(case)
    per_example = jax.vmap(jax.grad(partial(_loss, op, (inputs.bias,))), in_axes=(None, 0))
    with jax.default_device(jax.devices("cpu")[0]):
        assert compiled_calls(per_example, inputs.rhs, inputs.lhs) == (1, 0, 1)
        found = jax.jit(per_example)(inputs.rhs, inputs.lhs)
    assert found.shape == (5, *inputs.rhs.shape)
    for i in range(5):
        _close(found[i], jax.grad(partial(_loss, op, (inputs.bias,)))(inputs.rhs, inputs.lhs[i]))


@pytest.mark.parametrize(("num_problems", "size"), [(9, 32), (1, 96)], ids=["shared_out", "a_team_for_each"])
@pytest.mark.parametrize("layout", [("NHWC", "HWIO", "NHWC"), ("HNWC", "OIHW", "NCHW")], ids="-".join)
def test_independent_problems_run_on_several_threads(num_problems, size, layout):
    case = ConvCase(spatial=(size, size), window=(3, 3), features=8, out_features=16, padding="SAME", layout=layout)
    op, make = _op_and_draw(ONEDNN, case)
    inputs, in_axes = _stacked_inputs(case, make, FIELDS, num_problems)
    results = partial(_results, op)
    _compare(_jit(jax.vmap(results))(*inputs), _jit(results), inputs, in_axes, num_problems)


def test_independent_problems_fold_into_groups():
    """Kernels without an axis of problems are selected by the folded shapes that they are called with."""
    g = ConvGeometry((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2), (1, 2), ((1, 0), (0, 2)), (1, 1), 2, (5, 6), (2, 3))
    x, w = np.zeros((N, 7, 5, 6, 4), np.float32), np.zeros((N, 2, 3, 2, 10), np.float32)
    called = forward_problem(g.in_groups(N), fold(x, 3), fold(w, 3))
    assert forward_problem(g, x, w).in_groups() == called
    assert called.shapes[:2] == ((7, 5, 6, 12), (2, 3, 2, 30))


def test_handler_checks_the_number_of_problems():
    g = ConvGeometry((0, 1, 2), (0, 1, 2), (0, 1, 2), (1,), ((1, 1),), (1,), 1, (8,), (3,))
    shapes = [jax.ShapeDtypeStruct(s, np.float32) for s in ((3, 4, 2, 3), (0,))]
    call = jax.ffi.ffi_call(
        "jaxgrad_onednn_conv_weight_gradient", (*shapes, jax.ShapeDtypeStruct((1 << 16,), np.uint8))
    )
    attributes = {name: np.int64(value) for name, value in g.attributes().items()}
    ones = [jnp.ones(s, np.float32) for s in ((3, 5, 2, 8), (15, 4, 8), (14, 4, 8))]
    with jax.default_device(jax.devices("cpu")[0]):
        x, dy, wrong = ones
        dw = call(x, dy, **attributes)[0]
        np.testing.assert_array_equal(dw[..., 1], np.full((3, 4, 2), 40, np.float32))
        with pytest.raises(jax.errors.JaxRuntimeError, match="same number of independent problems"):
            jax.block_until_ready(call(x, wrong, **attributes))


@pytest.mark.parametrize("names", [("lhs",), ("rhs",), ("lhs", "rhs"), ("rhs", "bias")], ids="-".join)
def test_vmap_of_the_forward_pass_is_one_call(names):
    case = CASES["plain"]
    op, make = _op_and_draw(ONEDNN, case)
    inputs, in_axes = _stacked_inputs(case, make, names)
    mapped = jax.vmap(op, in_axes=tuple(in_axes))
    assert compiled_calls(mapped, *inputs) == (1, 0, 0)


@pytest.mark.parametrize("names", [("bias",), ("lhs", "bias")], ids="-".join)
@pytest.mark.parametrize("activation", [None, "relu"])
def test_a_mapped_bias_does_not_copy_the_weights(names, activation):
    """The weights that all problems share are one operand of one call, and each bias is added to the result."""
    case = CASES["plain"]
    inputs, in_axes = _stacked_inputs(case, make_conv_inputs, names)
    op = conv(ONEDNN, **case.settings, activation=activation)
    mapped = jax.vmap(op, in_axes=tuple(in_axes))
    text = jax.jit(mapped).lower(*inputs).as_text()
    (line,) = [line for line in text.splitlines() if "custom_call @jaxgrad_onednn_conv_forward" in line]
    weights = "x".join(map(str, inputs.rhs.shape))
    assert f"tensor<{weights}xf32>" in line.partition("->")[0], line
    found = mapped(*inputs)
    for i in range(N):
        _close(found[i], op(*_problem(inputs, in_axes, i)))


def test_grad_of_vmap_sums_over_the_problems(backend):
    case = CASES["groups"]
    op, make = _op_and_draw(backend, case)
    inputs, in_axes = _stacked_inputs(case, make, ("lhs",))
    inputs = backend.put(tuple(inputs))

    def mapped(inputs):
        return jnp.sum(jnp.sin(jax.vmap(op, in_axes=tuple(in_axes))(*inputs)))

    def looped(inputs):
        return sum(jnp.sum(jnp.sin(op(*_problem(inputs, in_axes, i)))) for i in range(N))

    for found, expected in zip(_jit(jax.grad(mapped))(inputs), _jit(jax.grad(looped))(inputs), strict=True):
        _close(found, expected)


@pytest.mark.parametrize("kind", ["plain", "transposed_groups"])
def test_a_gradient_penalty_under_vmap(backend, kind):
    case = CASES[kind]
    op, make = _op_and_draw(backend, case)
    inputs, in_axes = _stacked_inputs(case, make, ("lhs", "bias"))
    inputs = backend.put(tuple(inputs))

    def second(lhs, rhs, bias):
        def penalty(rhs):
            return jnp.sum(jax.grad(lambda lhs: jnp.sum(jnp.sin(op(lhs, rhs, bias))))(lhs) ** 2)

        return jax.grad(penalty)(rhs)

    found = _jit(jax.vmap(second, in_axes=tuple(in_axes)))(*inputs)
    single = _jit(second)
    for i in range(N):
        _close(found[i], single(*_problem(inputs, in_axes, i)))


def test_more_problems_than_any_kernel_supports():
    """A call that the kernels accept runs under `vmap` too, on the kernels or on XLA."""
    case = ConvCase(spatial=(3, 2), window=(1, 1), features=1, out_features=1, groups=1, bias=False)
    op, make = _op_and_draw(Backend(None, "cpu"), case)
    inputs, _ = _stacked_inputs(case, make, ("lhs", "rhs"), 70)
    y = jax.vmap(op, in_axes=(0, 0))(*inputs[:2])
    np.testing.assert_allclose(y, inputs.lhs * inputs.rhs.reshape(70, 1, 1, 1, 1), rtol=1e-6)
