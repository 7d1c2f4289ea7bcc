"""Windows that do not overlap, such as patch embeddings: on XLA, every pass is a matrix product."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accelerated import passes as passes_in
from backends import XLA, XLA_ON_GPU, Backend
from conv_cases import FIELDS, ConvCase, cotangent, draw_sizes, make_conv_inputs, result_sizes
from conv_references import in_float64, lax_conv
from conv_running import assert_same, conv, conv_transpose, run, terms
from conv_transpose_cases import TransposeCase, lax_conv_transpose, make_transpose_inputs
from jax import lax
from thorough import one_in, thorough_after

import jaxgrad
from jaxgrad._src.conv.on_xla import forms as xla_forms
from jaxgrad._src.conv.on_xla import patches
from jaxgrad._src.native import cuda

BACKENDS = (Backend(None, "cpu"), Backend(None, "gpu"), XLA, XLA_ON_GPU)

LAST, FIRST = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")
PLAIN = ConvCase(spatial=(6, 10), window=(3, 5), strides=(3, 5), layout=LAST)
CASES = {
    "last": PLAIN,
    "first": PLAIN.replace(layout=FIRST),
    "permuted": PLAIN.replace(layout=("CWNH", "WOHI", "HNCW")),
    "one axis": ConvCase(spatial=(12,), window=(4,), strides=(4,)),
    "volume": ConvCase(spatial=(4, 3, 10), window=(2, 1, 5), strides=(2, 1, 5), layout=("NDHWC", "DHWIO", "NDHWC")),
    "unread": PLAIN.replace(spatial=(8, 13)),
    "padded": PLAIN.replace(spatial=(5, 7), padding=((1, 0), (4, 4))),
    "cropped": PLAIN.replace(spatial=(9, 13), padding=((-2, 0), (-1, -2))),
    "cropped and padded": PLAIN.replace(spatial=(8, 11), padding=((-2, 3), (4, -5)), layout=FIRST),
    "padded by windows": PLAIN.replace(padding=((7, 0), (0, 11))),
    "one window": PLAIN.replace(spatial=(7, 6), strides=(2**20, 2**40)),
    "gaps": PLAIN.replace(spatial=(11, 19), strides=(4, 7)),
    "dilated": PLAIN.replace(
        spatial=(17, 23), window=(3, 2), strides=(6, 7), rhs_dilation=(2, 5), padding=((1, 2), (0, 3))
    ),
    "groups": PLAIN.replace(groups=3, padding=((2, 0), (0, 1)), layout=FIRST),
    "many groups": PLAIN.replace(groups=5),
    "rows": PLAIN.replace(features=4),
    "rows, groups": PLAIN.replace(features=4, groups=2, spatial=(7, 12), padding=((1, 0), (0, -2))),
    "rows, one axis": ConvCase(spatial=(12,), window=(4,), strides=(4,), layout=("NWC", "WIO", "NWC")),
    "rows, gaps": PLAIN.replace(features=2, spatial=(11, 19), window=(2, 4), strides=(4, 7), rhs_dilation=(2, 2)),
    "rows, volume": ConvCase(
        spatial=(5, 3, 10), window=(2, 1, 5), strides=(2, 1, 5), features=2, layout=("NDHWC", "DHWIO", "NDHWC")
    ),
    "no bias": PLAIN.replace(bias=False),
    "up": TransposeCase(window=(2, 3), strides=(2, 3), padding="VALID"),
    "up, first": TransposeCase(window=(2, 3), strides=(2, 3), padding="SAME", layout=FIRST, transpose_kernel=True),
    "up, groups": TransposeCase(
        window=(2, 3), strides=(3, 3), padding=((1, 1), (2, 2)), groups=2, output_padding=(1, 2)
    ),
    "up, cropped": TransposeCase(window=(2, 3), strides=(2, 3), padding=((0, 1), (-1, 0))),
}
OVERLAPPING = {
    "stride": PLAIN.replace(strides=(3, 4)),
    "dilation": PLAIN.replace(spatial=(6, 18), strides=(3, 8), rhs_dilation=(1, 2)),
    "single elements": PLAIN.replace(window=(1, 1)),
    "depthwise": PLAIN.replace(groups=4, features=1, out_features=1),
}


def _parts(backend, case, dtype="float32"):
    """The op, the reference in plain JAX, and inputs."""
    if isinstance(case, TransposeCase):
        return conv_transpose(backend, **case.settings), lax_conv_transpose(case), make_transpose_inputs(case, dtype)
    return conv(backend, **case.settings), lax_conv(case), make_conv_inputs(case, dtype)


def _check(backend, case, dtype):
    op, plain, inputs = _parts(backend, case, dtype)
    y = jax.eval_shape(plain, *inputs)
    dy = cotangent(y.shape, dtype)
    expected = in_float64(plain, inputs, dy)
    found = run(op, backend.put(inputs), backend.put(dy))
    assert_same(found, expected, dtype=dtype, terms=terms(inputs, y), message=f"{backend} {case}")


@pytest.mark.parametrize("name", one_in(2, CASES))
def test_values_and_gradients(backend, name):
    _check(backend, CASES[name], "float32")


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["cropped and padded", "groups", "rows, gaps", "rows, groups", "up"])
def test_dtypes(backend, name, dtype):
    _check(backend, CASES[name], dtype)


def _random_case(seed):
    """Strides of at least the extent of the window, and any padding."""
    rng = np.random.default_rng([seed, 3])
    while True:
        n = int(rng.choice([1, 2, 2, 3]))
        case = ConvCase(**draw_sizes(rng, n), seed=seed)
        extents = [(k - 1) * d + 1 for k, d in zip(case.window, case.rhs_dilation or (1,) * n, strict=True)]
        gaps = rng.integers(0, 3, n) if rng.random() < 0.3 else [0] * n
        padding = tuple((int(low), int(high)) for low, high in rng.integers(-3, 6, (n, 2)))
        case = case.replace(strides=tuple(k + int(gap) for k, gap in zip(extents, gaps, strict=True)), padding=padding)
        sizes = [size + sum(pair) for size, pair in zip(case.spatial, padding, strict=True)]
        cropped = [size + min(0, a) + min(0, b) for size, (a, b) in zip(case.spatial, padding, strict=True)]
        if min(*sizes, *cropped, *result_sizes(case)) > 0:
            return case


@pytest.mark.parametrize("block", thorough_after(2, range(4)))
def test_random_cases(block):
    for seed in range(8 * block, 8 * block + 8):
        _check(XLA, _random_case(seed), ("float32", "float64", "bfloat16", "float32")[seed % 4])


def _with_gradients(op):
    def both(dy, *inputs):
        y, pullback = jax.vjp(op, *inputs)
        return y, pullback(dy)

    return both


def _lowered(case, platform):
    op, _, inputs = _parts(Backend("xla", platform), case)
    lhs, rhs, bias = (None if a is None else jax.ShapeDtypeStruct(a.shape, a.dtype) for a in inputs)
    dy = jax.eval_shape(op, lhs, rhs, bias)
    traced = jax.jit(_with_gradients(op)).trace(dy, lhs, rhs, bias)
    return traced.lower(lowering_platforms=("cuda" if platform == "gpu" else platform,)).as_text()


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("name", CASES)
def test_every_pass_is_one_matrix_product(name, platform):
    """But for the forward pass of a few groups, which have a product each."""
    text, groups = _lowered(CASES[name], platform), CASES[name].groups
    products = 2 + (groups if groups <= patches._FEW_GROUPS else 1)
    assert (text.count("stablehlo.convolution"), text.count("stablehlo.dot_general")) == (0, products)


def _contracted_axes(case):
    """The number of axes over which the product of the forward pass sums."""
    op, _, inputs = _parts(Backend("xla", "gpu"), case.replace(bias=False))
    (axes,) = set(re.findall(r"contracting_dims = \[([\d, ]+)\]", jax.jit(op).lower(*inputs[:2]).as_text()))
    return len(axes.split(","))


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("rows")])
def test_aligned_rows_have_one_axis_for_the_last_window_axis_and_the_features(name):
    n = len(CASES[name].window)
    assert _contracted_axes(CASES[name]) == n
    assert _contracted_axes(CASES[name].replace(features=1, window=(*CASES[name].window[:-1], 3))) == n + 1


@pytest.mark.parametrize(
    "changed",
    [{"groups": 5}, {"layout": ("NHWC", "OHWI", "NHWC")}, {"layout": FIRST}, {"features": 7}, {"features": 8}],
)
def test_others_have_an_axis_for_the_features(changed):
    assert _contracted_axes(CASES["rows"].replace(**changed)) == 3


@pytest.mark.parametrize("name", OVERLAPPING)
def test_other_windows_are_convolutions(name):
    assert "stablehlo.convolution" in _lowered(OVERLAPPING[name], "cpu")
    _check(XLA, OVERLAPPING[name], "float32")


def test_many_features_on_a_gpu_are_convolutions_but_for_some_large_windows():
    text = _lowered(PLAIN.replace(features=16), "gpu")
    assert (text.count("stablehlo.convolution"), text.count("stablehlo.dot_general")) == (2, 1)
    small = PLAIN.replace(features=16, window=(2, 3), strides=(2, 3))
    text = _lowered(small, "gpu")
    assert (text.count("stablehlo.convolution"), text.count("stablehlo.dot_general")) == (3, 0)
    huge = {"spatial": (16, 32), "window": (16, 16), "strides": (16, 16)}
    for groups, found in ((1, (2, 1)), (2, (0, 4)), (5, (2, 1))):
        text = _lowered(PLAIN.replace(features=16, groups=groups, **huge), "gpu")
        assert (text.count("stablehlo.convolution"), text.count("stablehlo.dot_general")) == found
    for case in (PLAIN.replace(features=16), small):
        assert "stablehlo.convolution" not in _lowered(case, "cpu")


def test_the_precision_is_kept():
    op, _, inputs = _parts(Backend("xla", "gpu"), PLAIN)
    highest = partial(op.args[0], precision="highest", **op.args[1])
    assert jax.jit(highest).lower(*inputs[:2]).as_text().count("precision = [HIGHEST, HIGHEST]") == 1


@pytest.mark.parametrize("field", ["lhs", "rhs"])
def test_nonfinite_values_stay_in_their_window(backend, field):
    """NaN and infinity are where a sum reads them, and elements in no window have the gradient zero."""
    case = PLAIN.replace(spatial=(11, 13), strides=(4, 6), layout=FIRST, bias=False)
    inputs = make_conv_inputs(case)
    spoiled = np.array(getattr(inputs, field))
    spoiled.reshape(-1)[[3, spoiled.size // 2, -1]] = np.nan, np.inf, -np.inf
    inputs = inputs._replace(**{field: spoiled})
    dy = cotangent((2, 5, 3, 2), "float32")
    found = run(conv(backend, **case.settings), backend.put(inputs), backend.put(dy))
    y, dx, dw = np.zeros(dy.shape), np.zeros(inputs.lhs.shape), np.zeros(inputs.rhs.shape)
    for row, column in np.ndindex(3, 2):
        window = (..., slice(4 * row, 4 * row + 3), slice(6 * column, 6 * column + 5))
        y[..., row, column] = np.einsum("nihw,oihw->no", inputs.lhs[window], inputs.rhs)
        dx[window] = np.einsum("no,oihw->nihw", dy[..., row, column], inputs.rhs)
        dw += np.einsum("nihw,no->oihw", inputs.lhs[window], dy[..., row, column])
    for actual, expected in zip(found[:3], (y, dx, dw), strict=True):
        np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
        np.testing.assert_array_equal(np.isinf(actual), np.isinf(expected))
    assert not np.isfinite(y).all()
    assert not found.lhs[..., 3, :].any()
    assert not found.lhs[..., -2:].any()


def test_an_empty_batch():
    case = PLAIN.replace(batch=0)
    found = run(conv(XLA, **case.settings), make_conv_inputs(case), np.zeros((0, 2, 2, 5), np.float32))
    assert (found.y.shape, found.lhs.shape) == ((0, 2, 2, 5), (0, 6, 10, 3))
    assert not found.rhs.any()


@pytest.mark.parametrize("mapped", [("lhs",), ("rhs", "bias"), FIELDS], ids="-".join)
@pytest.mark.parametrize("name", ["padded", "groups", "rows, gaps", "up"])
def test_vmap(backend, name, mapped):
    case = CASES[name]
    op, _, inputs = _parts(backend, case)
    drawn = [_parts(backend, case.replace(seed=seed))[2] for seed in range(3)]
    stacked = inputs._replace(**{field: np.stack([getattr(one, field) for one in drawn]) for field in mapped})
    axes = tuple(0 if field in mapped else None for field in FIELDS)

    def results(*inputs):
        y, pullback = jax.vjp(op, *inputs)
        return y, pullback(jnp.cos(y))

    stacked = backend.put(tuple(stacked))
    found = jax.jit(jax.vmap(results, in_axes=axes))(*stacked)
    for i in range(3):
        expected = results(*(a if axis is None else a[i] for a, axis in zip(stacked, axes, strict=True)))
        jax.tree.map(lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=0, atol=_atol(b)), found, expected)
    if backend == XLA:
        assert " convolution(" not in jax.jit(jax.vmap(results, in_axes=axes)).lower(*stacked).compile().as_text()


def _atol(expected):
    return (2e-5 if jax.default_backend() == "cpu" else 2e-3) * max(1.0, np.abs(expected).max())  # TF32


@pytest.mark.parametrize("name", ["cropped and padded", "groups", "up, cropped"])
def test_gradients_of_a_gradient_penalty(backend, name):
    op, plain, inputs = _parts(backend, CASES[name])

    def penalty(op, inputs):
        gradients = jax.grad(lambda inputs: jnp.sum(jnp.sin(op(*inputs))))(inputs)
        return sum(jnp.vdot(g, g) for g in gradients)

    expected = jax.jit(jax.grad(partial(penalty, plain)))(tuple(inputs))
    found = jax.jit(jax.grad(partial(penalty, op)))(backend.put(tuple(inputs)))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=5 * _atol(b))


def test_forward_mode():
    op, plain, inputs = _parts(XLA, CASES["cropped and padded"])
    tangents = tuple(np.cos(a) for a in inputs)
    with jaxgrad.forward_mode():
        found = jax.jit(partial(jax.jvp, op))(tuple(inputs), tangents)
    expected = jax.jit(partial(jax.jvp, plain))(tuple(inputs), tangents)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=_atol(b)), found, expected)


def test_export_with_a_fixed_shape():
    op, _, inputs = _parts(XLA, PLAIN)
    exported = jax.export.deserialize(jax.export.export(jax.jit(op))(*inputs).serialize())
    np.testing.assert_allclose(exported.call(*inputs), op(*inputs), rtol=0, atol=1e-6)


# --- selection -------------------------------------------------------------------------------------------------------


PATCH_16 = ConvCase(spatial=(32, 48), window=(16, 16), strides=(16, 16), out_features=8, layout=LAST, bias=False)


def _explanation(case, platform, dtype, **settings):
    lhs, rhs, _ = (None if shape is None else jax.ShapeDtypeStruct(shape, dtype) for shape in case.shapes)
    op = jaxgrad.conv_transpose if isinstance(case, TransposeCase) else jaxgrad.conv_general_dilated
    return jaxgrad.explain(op, lhs, rhs, platform=platform, **case.settings, **settings)


def _explained(*case, **settings):
    return str(_explanation(*case, **settings))


@pytest.mark.parametrize("name", ["last", "groups", "up"])
def test_explain_names_the_matrix_product(name):
    for settings in {"dtype": "float64"}, {"dtype": "float32", "implementation": "xla"}:
        explained = _explained(CASES[name], "cpu", **settings)
        assert xla_forms.OF_PATCHES in explained
        assert (xla_forms.OF_PATCHES_BY_GROUP in explained) == (name == "groups")  # the forward pass
    # Which passes oneDNN runs depends on the CPU.
    explained = _explanation(CASES[name].replace(batch=16), "cpu", "float32")
    passes = explained.passes or [explained]  # all alike
    assert {each.implementation for each in passes} <= {"onednn", "xla"}
    for each in passes:
        assert (xla_forms.OF_PATCHES in each.reason) == (each.implementation == "xla"), each
    assert xla_forms.OF_PATCHES not in _explained(OVERLAPPING["stride"], "cpu", "float64")


@pytest.mark.skipif(not cuda.targets(), reason="needs the compiled CUDA module")
def test_explain_names_the_matrix_product_of_a_patch_embedding_on_a_gpu():
    large = PATCH_16.replace(batch=64, spatial=(224, 224), out_features=768)
    assert _explained(large, "gpu", "bfloat16").count(xla_forms.OF_PATCHES) == 1  # all passes alike
    groups = PATCH_16.replace(groups=2, spatial=(32, 32))
    assert "cuDNN" not in _explained(groups, "gpu", "bfloat16")  # but not that XLA calls cuDNN for this class


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_accelerate_reads_each_pass_by_its_windows(dtype):
    """JAX writes the three passes as convolutions. None of them is read as a pass with a dilated window."""
    lhs, rhs, _ = make_conv_inputs(PATCH_16, dtype)

    def loss(lhs, rhs):
        return jnp.sum(jnp.sin(lax.conv_general_dilated(lhs, rhs, **PATCH_16.settings)))

    gradient = jax.value_and_grad(loss, (0, 1))
    accelerated = jaxgrad.accelerate(gradient)
    found = jaxgrad.report(accelerated, lhs, rhs, platform="cpu").convolutions
    reasons = {"forward": "oneDNN", "input_gradient": xla_forms.OF_PATCHES, "weight_gradient": "oneDNN"}
    if dtype == "float64":
        reasons = dict.fromkeys(reasons, f"oneDNN has no float64; {xla_forms.OF_PATCHES}")
    assert {convolution.pass_name: convolution.reason for convolution in found} == reasons
    lowered = jax.jit(accelerated).lower(lhs, rhs)
    assert passes_in(lowered) == {name: 1 for name, reason in reasons.items() if reason == "oneDNN"}
    results, expected = jax.jit(accelerated)(lhs, rhs), jax.jit(gradient)(lhs, rhs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=_atol(b)), results, expected)


@pytest.mark.parametrize("rate", [6, 36])
def test_accelerate_reads_a_dilated_window_as_a_forward_pass(rate):
    """Read as a weight gradient, windows that are further apart than the result is large do not overlap."""
    x, w = jax.ShapeDtypeStruct((2, 33, 33, 8), "float32"), jax.ShapeDtypeStruct((3, 3, 8, 16), "float32")

    def atrous(x, w):
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", rhs_dilation=(rate, rate), dimension_numbers=numbers)

    (found,) = jaxgrad.report(jaxgrad.accelerate(atrous), x, w, platform="cpu").convolutions
    assert (found.pass_name, found.reason) == ("forward", "oneDNN")
