"""Dtypes of results and gradients match `jax.lax`, and values match in every dtype."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import CONVOLUTION, ONEDNN, Backend
from conv_cases import ConvCase, cotangent, make_conv_inputs
from conv_references import in_float64, lax_conv
from conv_running import assert_same, conv, conv_transpose, run, terms
from conv_transpose_cases import TransposeCase, lax_conv_transpose, make_transpose_inputs
from jax import lax
from thorough import one_in
from tolerances import DTYPES, assert_close

import jaxgrad
from jaxgrad._src.conv.call.geometry import ConvGeometry
from jaxgrad._src.conv.call.problem import ConvProblem
from jaxgrad._src.conv.kernels import onednn

BACKENDS = CONVOLUTION

CASE = ConvCase(spatial=(9, 7), window=(3, 2), features=8, out_features=16, strides=(2, 1), padding=((1, 2), (0, 1)))
TRANSPOSED = TransposeCase(features=8, out_features=16, strides=(2, 1))
DEFAULT = Backend(None, "cpu")
ON_KERNEL = ["float32", "bfloat16", "float16"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("layout", [None, ("NHWC", "HWIO", "NHWC")], ids=["first", "last"])
def test_each_dtype(backend, dtype, groups, layout):
    if dtype == "float64" and backend.implementation == "onednn":
        pytest.skip("oneDNN has no float64")
    case = CASE.replace(groups=groups, layout=layout)
    inputs = make_conv_inputs(case, dtype)
    y = jax.eval_shape(lax_conv(case), *inputs)
    dy = cotangent(y.shape, dtype)
    expected = in_float64(lax_conv(case), inputs, dy)
    actual = run(conv(backend, **case.settings), type(inputs)(*backend.put(tuple(inputs))), backend.put(dy))
    assert_same(actual, expected, dtype=dtype, terms=terms(inputs, y))


@pytest.mark.parametrize("dtype", ON_KERNEL)
def test_transposed_in_each_dtype_on_the_kernel(dtype):
    inputs = make_transpose_inputs(TRANSPOSED, dtype)
    plain = lax_conv_transpose(TRANSPOSED)
    y = jax.eval_shape(plain, *inputs)
    dy = cotangent(y.shape, dtype)
    actual = run(conv_transpose(ONEDNN, **TRANSPOSED.settings), inputs, dy)
    assert_same(actual, in_float64(plain, inputs, dy), dtype=dtype, terms=terms(inputs, y))


@pytest.mark.parametrize(("given", "preferred"), one_in(3, itertools.product(DTYPES, DTYPES), several=True))
def test_preferred_element_type(given, preferred):
    """The result is computed in the preferred dtype; the gradients have the dtypes of the operands."""
    case = CASE.replace(bias=False)
    inputs = make_conv_inputs(case, given)
    settings = {**case.settings, "preferred_element_type": preferred}
    try:
        shape = jax.eval_shape(lambda x, w: lax.conv_general_dilated(x, w, **settings), *inputs[:2])
    except (TypeError, ValueError) as error:
        with pytest.raises(type(error)):
            conv(DEFAULT, **settings)(*inputs)
        return
    plain = lax_conv(case.replace(bias=False))
    dy = cotangent(shape.shape, preferred)
    y = jax.jit(conv(DEFAULT, **settings))(*inputs)
    assert y.dtype == shape.dtype == DTYPES[preferred]
    if given != preferred and DTYPES[given].itemsize == DTYPES[preferred].itemsize:
        plainly = lax.conv_general_dilated(*inputs[:2], **settings)  # rounds bfloat16 and float16 to one another
        np.testing.assert_allclose(y.astype(np.float64), plainly.astype(np.float64), rtol=0, atol=2.0**-6)
        return
    wide = min(given, preferred, key=lambda name: DTYPES[name].itemsize)
    expected = in_float64(plain, inputs, dy)
    assert_close(np.asarray(y, DTYPES[wide]), expected.y, dtype=wide, terms=terms(inputs, y))
    if DTYPES[preferred].itemsize < DTYPES[given].itemsize:
        return  # jax.lax itself does not differentiate these on every release
    found = run(conv(DEFAULT, **settings), inputs, dy)
    assert {found.lhs.dtype, found.rhs.dtype} == {DTYPES[given]}
    for name in ("lhs", "rhs"):
        gradient, desired = getattr(found, name), getattr(expected, name)
        assert_close(gradient, desired, dtype=given, terms=terms(inputs, y), name=name)


def test_only_the_result_is_rounded_to_a_narrower_range():
    """An operand of 100000 exceeds the range of float16; the result of 100 does not."""
    lhs, rhs = np.full((1, 1, 1), 1e5, jnp.bfloat16), np.full((1, 1, 1), 1e-3, jnp.bfloat16)
    y = jaxgrad.conv_general_dilated(lhs, rhs, (1,), "VALID", preferred_element_type=np.float16)
    expected = lax.conv_general_dilated(lhs, rhs, (1,), "VALID", preferred_element_type=np.float16)
    np.testing.assert_array_equal(y, expected)
    assert np.isfinite(y).all()


@pytest.mark.parametrize(
    ("given", "preferred"), [("bfloat16", "float32"), ("float16", "float32"), ("float32", "float32")]
)
@pytest.mark.parametrize("transposed", [False, True])
def test_preferred_element_type_on_the_kernel(given, preferred, transposed):
    """The result has the precision of float32: no intermediate value is rounded to the narrow dtype."""
    case = TRANSPOSED if transposed else CASE
    make, op = (make_transpose_inputs, conv_transpose) if transposed else (make_conv_inputs, conv)
    inputs = make(case.replace(bias=False), given)
    plain = lax_conv_transpose(case) if transposed else lax_conv(case)
    bias = np.arange(case.out_features, dtype=preferred)
    y = op(ONEDNN, **case.settings, preferred_element_type=preferred)(*inputs[:2], bias)
    expected = plain(*(np.asarray(a, np.float64) for a in (*inputs[:2], bias)))
    assert_close(y, expected, dtype=preferred, terms=terms(inputs, y))


PRECISIONS = [
    None,
    "highest",
    "default",
    lax.Precision.HIGHEST,
    ("highest", "highest"),
    ["highest", "highest"],
    (lax.Precision.HIGHEST,) * 2,
]


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_every_form_of_precision(backend, precision):
    inputs = make_conv_inputs(CASE.replace(groups=4))
    settings = CASE.replace(groups=4).settings
    dy = cotangent((2, 64, 5, 7), "float32")
    expected = run(conv(backend, **settings), inputs, dy)
    found = run(conv(backend, **settings, precision=precision), inputs, dy)
    rounding = "tensorfloat32" if backend.platform == "gpu" and precision == "default" else None
    assert_same(found, expected, dtype="float32", terms=terms(inputs, dy), rounding=rounding)


def test_the_precision_in_force_holds_for_gradients():
    """JAX's precision where the op is called, as in `jax.lax`, also where a gradient is traced elsewhere."""
    settings = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "feature_group_count": 3, "implementation": "xla"}

    def loss(x, w):
        with jax.default_matmul_precision("highest"):
            return jnp.sum(jaxgrad.conv_general_dilated(x, w, (1, 1), "SAME", **settings))

    with jax.default_matmul_precision("default"):
        text = jax.jit(jax.grad(loss, (0, 1))).lower(jnp.ones((2, 5, 5, 3)), jnp.ones((3, 3, 1, 6))).as_text()
    products = text.count("stablehlo.convolution") + text.count("stablehlo.dot_general")
    assert products >= 2
    assert text.count("HIGHEST") == 2 * products


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [CASE, CASE.replace(groups=4), TRANSPOSED], ids=["plain", "groups", "transposed"])
def test_strict_dtype_promotion(backend, dtype, case):
    if dtype == "float64" and backend.implementation == "onednn":
        pytest.skip("oneDNN has no float64")
    transposed = isinstance(case, TransposeCase)
    inputs = make_transpose_inputs(case, dtype) if transposed else make_conv_inputs(case, dtype)
    op = (conv_transpose if transposed else conv)(backend, **case.settings)
    y = jax.eval_shape(op, *inputs)
    dy = cotangent(y.shape, dtype)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        found = run(op, inputs, dy)
    assert_same(found, run(op, inputs, dy), dtype=dtype, terms=1)


def test_weak_types_do_not_leak():
    inputs = make_conv_inputs(CASE)
    y = jax.eval_shape(conv(ONEDNN, **CASE.settings), *inputs)
    assert not y.weak_type
    ones = jnp.ones((2, 8, 9, 7)) * 2.0
    assert ones.dtype == jnp.float64
    with pytest.raises(TypeError):
        jaxgrad.conv_general_dilated(ones, inputs.rhs, (1, 1), "SAME")


_WITHOUT_X64 = """
import jax, numpy as np, jax.numpy as jnp
assert not jax.config.jax_enable_x64
from conv_cases import ConvCase, make_conv_inputs
from conv_references import numpy_conv, numpy_weight_gradient
from conv_running import conv, run
from backends import ONEDNN, XLA

case = ConvCase(groups=2, strides=(2, 1), padding=((1, 2), (0, 1)), bias=False)
inputs = make_conv_inputs(case)
wide = [np.asarray(a, np.float64) for a in inputs[:2]]
arguments = ((2, 1), ((1, 2), (0, 1)), (1, 1), 2)
expected = numpy_conv(*wide, *arguments)
dy = np.random.default_rng(0).standard_normal(expected.shape).astype(np.float32)
dw = numpy_weight_gradient(wide[0], wide[1].shape, dy.astype(np.float64), *arguments)
for backend in (ONEDNN, XLA):
    found = run(conv(backend, **case.settings), inputs, dy)
    assert {a.dtype.name for a in (found.y, found.lhs, found.rhs)} == {"float32"}
    np.testing.assert_allclose(found.y, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(found.rhs, dw, rtol=0, atol=1e-4)
    # JAX converts a float64 NumPy array to float32.
    assert conv(backend, **case.settings)(*wide).dtype == jnp.float32
"""


def test_without_64_bit_types(run_python):
    run_python(_WITHOUT_X64, JAX_ENABLE_X64="0")


_NARROW = """
import itertools
import jax, jax.numpy as jnp, numpy as np
import jaxgrad

def gradient(implementation, dtype, shape):
    loss = lambda w: jnp.sum(jaxgrad.conv_general_dilated(
        jnp.asarray(x, dtype), w, **settings, implementation=implementation).astype(jnp.float32))
    return np.asarray(jax.jit(jax.grad(loss))(jnp.ones(shape, dtype)), np.float32)


for width, stride, groups in itertools.product((1, 2, 3), (1, 2, 3, 4), (1, 2)):
    x = np.random.default_rng(width).standard_normal((3, 5, width, 8 * groups))
    settings = dict(window_strides=(1, stride), padding=((1, 1), (2, 2)), feature_group_count=groups,
                    dimension_numbers=("NHWC", "HWIO", "NHWC"))

    expected = gradient("xla", "float32", (3, 3, 8, 4 * groups))
    actual = gradient("onednn", "bfloat16", (3, 3, 8, 4 * groups))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=0.02 * np.abs(expected).max())

for depth, window, stride in ((2, 3, 1), (1, 2, 1), (5, 3, 2)):  # windows that no depth holds, and one that it holds
    x = np.random.default_rng(depth).standard_normal((2, depth, 4, 3, 16))
    settings = dict(window_strides=(stride, 1, 1), padding=((1, 1),) * 3, dimension_numbers=("NDHWC", "DHWIO", "NDHWC"))
    expected = gradient("xla", "float32", (window, 3, 3, 16, 32))
    actual = gradient("onednn", "bfloat16", (window, 3, 3, 16, 32))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=0.02 * np.abs(expected).max())

for features, groups in ((24, 1), (4, 8), (16, 1)):  # dilated, with parts of a vector, and with a whole one
    x = np.random.default_rng(features).standard_normal((2, 56, 56, features * groups))
    settings = dict(window_strides=(1, 1), padding="SAME", rhs_dilation=(2, 2), feature_group_count=groups,
                    dimension_numbers=("NHWC", "HWIO", "NHWC"))
    expected = gradient("xla", "float32", (3, 3, features, 40))
    actual = gradient("onednn", "bfloat16", (3, 3, features, 40))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=0.02 * np.abs(expected).max())
"""


def test_narrow_bfloat16_weight_gradients_read_no_uninitialized_memory(run_python):
    """Allocated memory is filled with huge numbers: some oneDNN kernels read memory that they never wrote."""
    run_python(_NARROW, MALLOC_PERTURB_="128")


def test_weight_gradients_of_taps_over_padding_only():
    """oneDNN does not write these elements of a window with three spatial axes."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((2, 2, 4, 6, 6), (2, 2, 8, 2, 4)))
    arguments = (1, 1, 1), ((5, 1), (0, 0), (0, 0))
    want, got = (
        jax.grad(lambda w: jnp.sin(op(x, w, *arguments)).sum())(w)  # noqa: B023
        for op in (lax.conv_general_dilated, jaxgrad.conv_general_dilated)
    )
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    passes = jaxgrad.explain(jaxgrad.conv_general_dilated, x, w, *arguments, platform="cpu").passes
    assert [found.implementation for found in passes] == ["onednn", "onednn", "xla"]
    with pytest.raises(ValueError, match="covers only padding"):
        jaxgrad.conv_general_dilated(x, w, *arguments, implementation="onednn")


_OVER_PADDING = """
import jax
import jax.numpy as jnp
import numpy as np
import jaxgrad

for shapes, padding, dilation, strides, numbers in (
    (((3, 2, 10, 128), (4, 4, 128, 256)), ((4, 4), (4, 5)), (3, 3), (3, 3), ("NHWC", "HWIO", "NHWC")),
    (((2, 8, 1, 3), (4, 4, 16, 8)), ((7, 8), (6, 6)), (3, 2), (3, 1), ("NCHW", "HWOI", "NCHW")),
):
    x, w = (jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.bfloat16) for shape in shapes)
    bias = jnp.arange(w.shape[numbers[1].index("O")], dtype=jnp.bfloat16)

    def op(x, w):
        return jaxgrad.conv_general_dilated(x, w, strides, padding, None, dilation, dimension_numbers=numbers,
                                            bias=bias, implementation="onednn")

    y, gradients = jax.vjp(op, x, w)
    features = np.moveaxis(np.asarray(y, np.float32), numbers[2].index("C"), -1)
    np.testing.assert_array_equal(features, np.broadcast_to(np.asarray(bias, np.float32), features.shape))
    for gradient in gradients(y):
        assert not np.asarray(gradient, np.float32).any()
"""


def test_windows_over_padding_only_in_bfloat16(run_python, monkeypatch):
    """No window reaches x. oneDNN crashes while it creates a bfloat16 kernel for AMX, so that float32 kernels run."""
    run_python(_OVER_PADDING)
    monkeypatch.setattr(onednn, "onednn_has_bfloat16", lambda: True)
    last, first = (0, 3, 1, 2), (3, 2, 0, 1)
    for height, dtype in ((2, "float32"), (3, "bfloat16")):  # the third element of the window reaches x
        g = ConvGeometry(last, first, last, (3, 3), ((4, 4), (4, 5)), (3, 3), 1, (height, 10), (4, 4))
        problem = ConvProblem(g, 3, 128, 256, jnp.dtype("bfloat16"))
        assert onednn.computed_problem("forward", problem).dtype == dtype
