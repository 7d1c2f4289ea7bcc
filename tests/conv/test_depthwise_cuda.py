"""The CUDA kernels of depthwise convolutions, on a GPU, against the float64 reference."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import CUDA, Backend
from conv_cases import FIELDS, LAYOUT_KINDS, ConvCase, cotangent, layout, make_conv_inputs, result_sizes
from conv_references import in_float64, lax_conv
from conv_running import assert_same, conv, run, terms
from depthwise_calls import LARGE_WINDOWS, direct_sum
from jax import lax

import jaxgrad
from jaxgrad import config

pytestmark = pytest.mark.gpu

LAST = ("NHWC", "HWIO", "NHWC")
DTYPES = ("float32", "bfloat16", "float16")
CASE = ConvCase(
    spatial=(15, 14),
    window=(3, 5),
    features=1,
    out_features=1,
    groups=24,
    batch=4,
    strides=(2, 1),
    padding=((1, 0), (0, 2)),
    layout=LAST,
)


def depthwise_case(seed: int) -> ConvCase:
    """A random depthwise convolution over one to three axes, with unequal sizes, in any layout."""
    rng = np.random.default_rng(seed)
    while True:
        n = int(rng.choice([1, 2, 2, 3]))
        strides = tuple(map(int, rng.integers(1, 4, n))) if rng.random() < 0.5 else (1,) * n
        dilation = tuple(int(rng.integers(1, 4)) if stride == 1 else 1 for stride in strides)  # not both on an axis
        case = ConvCase(
            spatial=tuple(map(int, rng.integers(3, {1: 300, 2: 40, 3: 14}[n], n))),
            window=tuple(map(int, rng.integers(1, {1: 32, 2: 12, 3: 6}[n], n))),
            batch=int(rng.integers(1, 9)),
            features=1,
            out_features=1,
            groups=2 * int(rng.integers(1, 60)),
            strides=strides,
            padding=tuple((int(a), int(b)) for a, b in rng.integers(0, 6, (n, 2))),
            rhs_dilation=dilation,
            layout=layout(LAYOUT_KINDS[rng.integers(5)], n, rng),
            bias=bool(rng.random() < 0.5),
            seed=seed,
        )
        if min(result_sizes(case)) > 0:
            return case


def _check(case, dtype, backend=CUDA, requested=FIELDS):
    inputs = make_conv_inputs(case, dtype)
    plain = lax_conv(case)
    y = jax.eval_shape(plain, *inputs)
    dy = cotangent(y.shape, dtype, case.seed)
    actual = run(conv(backend, **case.settings), inputs, dy, requested)
    assert_same(
        actual, in_float64(plain, inputs, dy), dtype=dtype, terms=terms(inputs, y), message=f"{backend} {dtype} {case}"
    )


@pytest.mark.parametrize("seed", range(60))
def test_values_and_gradients(seed):
    _check(depthwise_case(seed), DTYPES[seed % 3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("spatial", "window"), [((190,), (31,)), ((17, 19), (11, 11)), ((9, 7, 8), (5, 5, 5))])
def test_the_largest_windows_of_the_random_calls(spatial, window, dtype):
    n = len(spatial)
    sizes = {"spatial": spatial, "window": window, "strides": (1,) * n, "padding": "SAME", "layout": layout("last", n)}
    _check(CASE.replace(**sizes), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [2, 12, 24, 76, 160])
def test_channels_that_blocks_do_and_do_not_divide(channels, dtype):
    _check(CASE.replace(groups=channels), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spatial", [(14, 15), (41,), (6, 9, 8)])
def test_relu_keeps_nan(spatial, dtype):
    """Bias and relu are part of the kernel. A NaN reaches the elements whose window covers it, and no other."""
    n = len(spatial)
    case = CASE.replace(
        spatial=spatial,
        window=(3,) * n,
        strides=(1,) * n,
        padding="SAME",
        layout=("NWC", "WIO", "NWC") if n == 1 else LAST if n == 2 else ("NDHWC", "DHWIO", "NDHWC"),
        bias=True,
    )
    inputs = make_conv_inputs(case, dtype)
    x = np.array(inputs.lhs)
    x[(0,) * (n + 2)] = np.nan
    call = conv(CUDA, **case.settings, activation="relu")
    found = np.asarray(call(x, inputs.rhs, inputs.bias)).astype(np.float64)
    is_nan = np.isnan(x)
    with jax.default_device(jax.devices("cpu")[0]):  # XLA multiplies NaN by the zeros of other groups: not with NaN
        covers_nan = (
            np.asarray(lax_conv(case)(1.0 * is_nan, np.ones(inputs.rhs.shape), np.zeros(inputs.bias.shape))) > 0
        )
        finite = (np.asarray(a, np.float64) for a in (np.where(is_nan, 0, x), inputs.rhs, inputs.bias))
        expected = np.where(covers_nan, np.nan, np.maximum(lax_conv(case)(*finite), 0))
    rounding = {"float32": 1e-5, "bfloat16": 8e-3, "float16": 1e-3}[dtype]
    np.testing.assert_allclose(found, expected, rtol=rounding, atol=rounding * np.nanmax(expected))


def _large(name):
    call = LARGE_WINDOWS[name]
    sizes = {"spatial": call.spatial, "window": call.window, "batch": call.batch, "groups": call.channels}
    return CASE.replace(**sizes, strides=(1, 1), padding=call.padding, bias=call.relu)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", LARGE_WINDOWS)
def test_products_of_matrices(name, dtype):
    _check(_large(name), dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_products_of_matrices_keep_infinities_and_nan_in_their_windows(dtype):
    call = LARGE_WINDOWS["13x11"]
    case = _large("13x11").replace(bias=True)
    inputs = make_conv_inputs(case, dtype)
    x, w, bias = np.array(inputs.lhs), np.asarray(inputs.rhs), np.asarray(inputs.bias)
    x[0, 3, 20, 1], x[1, 30, 39, 40], x[3, 17, 0, 9] = np.inf, np.nan, -np.inf
    found = np.asarray(conv(CUDA, **case.settings, activation="relu")(x, w, bias)).astype(np.float64)
    expected = direct_sum(call, "forward", x, w[:, :, 0], bias)
    rounding = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    np.testing.assert_allclose(found, expected, rtol=rounding, atol=rounding * 16)
    assert not np.isfinite(expected).all()


def test_gradients_of_gradients():
    """The derivatives of a pass are the other two passes."""
    inputs = make_conv_inputs(CASE)
    op = conv(CUDA, **CASE.settings)
    plain = lax_conv(CASE)

    def second(op, x, w, b):
        first = jax.grad(lambda w: jnp.sum(jnp.sin(op(x, w, b))))
        return jax.grad(lambda w: jnp.sum(first(w) ** 2))(w)

    found = jax.jit(lambda *a: second(op, *a))(*inputs)
    with jax.default_device(jax.devices("cpu")[0]):
        expected = second(plain, *(np.asarray(a, np.float64) for a in inputs))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_per_example_gradients():
    """`vmap` folds the independent problems into channels."""
    case = CASE.replace(batch=1, groups=12)
    x = np.random.default_rng(0).standard_normal((7, *case.shapes.lhs)).astype(np.float32)
    w = make_conv_inputs(case).rhs

    def gradient(op):
        return jax.vmap(jax.grad(lambda w, x: jnp.sum(jnp.sin(op(x, w)))), (None, 0))

    op = conv(CUDA, **case.settings)
    text = jax.jit(gradient(op)).lower(w, x).as_text()
    assert text.count("@jaxgrad_cuda_depthwise_weight_gradient") == 1
    found = jax.jit(gradient(op))(w, x)
    with jax.default_device(jax.devices("cpu")[0]):
        expected = gradient(_plain(case))(w.astype(np.float64), x.astype(np.float64))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def _plain(case):
    return lambda x, w: lax.conv_general_dilated(x, w, **case.settings)


REPEATED = {
    "two axes": CASE.replace(batch=32, groups=64),
    "one axis": CASE.replace(
        batch=8,
        groups=64,
        spatial=(700,),
        window=(31,),
        strides=(1,),
        padding=((15, 15),),
        layout=layout("last", 1),
    ),
    "three axes": CASE.replace(
        batch=8,
        groups=64,
        spatial=(13, 15, 14),
        window=(5, 3, 5),
        strides=(1, 2, 1),
        padding=((2, 2), (1, 1), (2, 2)),
        layout=layout("last", 3),
    ),
    "large window": _large("13x11"),
    "largest window": _large("31x29"),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", REPEATED)
def test_repeated_calls_are_bitwise_equal(name, dtype):
    case = REPEATED[name].replace(bias=False)
    inputs, op = make_conv_inputs(case, dtype), conv(CUDA, **case.settings)
    gradient = jax.jit(jax.value_and_grad(lambda x, w: jnp.sum(jnp.sin(op(x, w))), (0, 1)))
    found = {
        b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(gradient(inputs.lhs, inputs.rhs)))
        for _ in range(20)
    }
    assert len(found) == 1


def test_many_calls_recorded_into_a_graph():
    """Calls of several shapes in one program, replayed with new arrays: no call may keep earlier arrays."""
    cases = [CASE.replace(spatial=(10 + i, 12), groups=8 * (1 + i % 3)) for i in range(12)]

    def gradients(xs, ws):
        return [
            jax.grad(lambda w, x=x, case=case: jnp.sum(jnp.sin(conv(CUDA, **case.settings)(x, w))))(w)
            for case, x, w in zip(cases, xs, ws, strict=True)
        ]

    def plain(xs, ws):
        return [
            jax.grad(lambda w, x=x, case=case: jnp.sum(jnp.sin(_plain(case)(x, w))))(w)
            for case, x, w in zip(cases, xs, ws, strict=True)
        ]

    compiled, rng = jax.jit(gradients), np.random.default_rng(0)
    expected_of = jax.jit(plain)
    for _ in range(6):
        xs = [rng.standard_normal(case.shapes.lhs).astype(np.float32) for case in cases]
        ws = [rng.standard_normal(case.shapes.rhs).astype(np.float32) for case in cases]
        found, expected = compiled(xs, ws), expected_of(xs, ws)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(b).max())


def test_many_threads_at_once():
    """Each thread compiles and runs its own shape and a shared shape."""

    def check(seed):
        _check(CASE.replace(batch=1 + seed % 3), "float32")
        _check(depthwise_case(1000 + seed), "float32")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(check, range(8)))


def test_default_selection_matches_the_reference():
    case = ConvCase(
        spatial=(28, 28), window=(7, 7), features=1, out_features=1, groups=96, batch=4, padding="SAME", layout=LAST
    )
    inputs = make_conv_inputs(case)
    choice = jaxgrad.explain(jaxgrad.conv_general_dilated, *inputs[:2], **case.settings, platform="gpu")
    assert {unit.implementation for unit in choice.passes or [choice]} == {"cuda"}
    with config.override(deterministic=True):
        _check(case, "float32", Backend(None, "gpu"))


def test_transposed_convolutions():
    """The weight gradient of a transposed convolution is the same pass with x and dy exchanged."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((3, 9, 8, 20)), rng.standard_normal((3, 4, 1, 20))
    settings = {"feature_group_count": 20, "output_padding": (1, 0)}

    def gradient(x, w, implementation):
        call = jaxgrad.conv_transpose
        return jax.grad(
            lambda w: jnp.sum(jnp.sin(call(x, w, (2, 3), "SAME", **settings, implementation=implementation)))
        )(w)

    narrow = (x.astype(np.float32), w.astype(np.float32))
    assert (
        "jaxgrad_cuda_depthwise_weight_gradient" in jax.jit(gradient, static_argnums=2).lower(*narrow, "cuda").as_text()
    )
    found = gradient(*narrow, "cuda")
    with jax.default_device(jax.devices("cpu")[0]):
        expected = gradient(*(a.astype(np.float64) for a in narrow), "xla")
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
