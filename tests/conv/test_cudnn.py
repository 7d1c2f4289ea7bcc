"""The three convolution passes on cuDNN: random cases, TF32, search, workspace, plans, and command buffers."""

from __future__ import annotations

import math
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import CUDNN, Backend
from conv_cases import ConvCase, cotangent, make_conv_inputs, random_case
from conv_references import in_float64, lax_conv
from conv_running import PASSES, assert_same, calls, conv, conv_transpose, run, terms
from conv_transpose_cases import TransposeCase, lax_conv_transpose, make_transpose_inputs
from jax import lax

import jaxgrad
from jaxgrad import config
from jaxgrad._src.choice import table

pytestmark = pytest.mark.gpu

LAST, FIRST = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")
CASE = ConvCase(spatial=(15, 14), features=8, out_features=16, strides=(2, 1), padding=((1, 0), (0, 2)), layout=LAST)
DTYPES = ["float32", "bfloat16", "float16", "float64", "float32"]
DEFAULT_ON_GPU = Backend(None, "gpu")


def _check(backend, case, dtype):
    if isinstance(case, TransposeCase):
        inputs, plain, op = make_transpose_inputs(case, dtype), lax_conv_transpose(case), conv_transpose
    else:
        inputs, plain, op = make_conv_inputs(case, dtype), lax_conv(case), conv
    y = jax.eval_shape(plain, *inputs)
    dy = cotangent(y.shape, dtype, case.seed)
    actual = run(op(backend, **case.settings), inputs, dy)
    assert_same(
        actual, in_float64(plain, inputs, dy), dtype=dtype, terms=terms(inputs, y), message=f"{backend} {dtype} {case}"
    )


@pytest.mark.parametrize("seed", range(200))
def test_values_and_gradients(seed):
    case, dtype = random_case(seed), DTYPES[seed % 5]
    if case.lhs_dilation is not None and case.strides is not None:
        pytest.skip("no convolution pass of cuDNN")
    try:
        inputs = make_conv_inputs(case, dtype)
        jaxgrad.explain(jaxgrad.conv_general_dilated, *inputs[:2], **case.settings, implementation="cudnn")
    except ValueError as error:
        if "cropping leaves no input" in str(error):
            pytest.skip("runs on XLA")
        raise
    _check(CUDNN, case, dtype)
    if seed % 4 == 0:
        _check(DEFAULT_ON_GPU, case, dtype)


@pytest.mark.parametrize("dtype", DTYPES[:4])
@pytest.mark.parametrize("search", config.SEARCHES)
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_every_search(search, dtype, groups):
    case = CASE.replace(groups=groups, features=8 // groups, out_features=16 // groups)
    with config.override(search=search):
        _check(CUDNN, case, dtype)


@pytest.mark.parametrize("limit", [0, 1 << 16, 1 << 24])
def test_the_workspace_limit_holds(limit):
    case = ConvCase(spatial=(28, 28), batch=8, features=64, out_features=64, padding="SAME", layout=LAST)
    with config.override(workspace_limit=limit):
        _check(CUDNN, case, "float32")
        inputs = make_conv_inputs(case)
        gradient = jax.grad(lambda *inputs: jnp.sum(conv(CUDNN, **case.settings)(*inputs)), argnums=(0, 1))
        text = jax.jit(gradient).lower(*inputs).as_text()
    sizes = [int(part.split("xui8")[0].split("tensor<")[-1]) for part in text.split(", ") if "xui8>" in part]
    assert all(size <= limit for size in sizes), sizes


def test_tf32_unless_the_precision_is_the_highest():
    """TF32 has a mantissa of 10 bits; its errors are hundreds of times those of float32."""
    case = ConvCase(spatial=(16, 16), features=64, out_features=64, padding="SAME", layout=LAST, bias=False)
    inputs = make_conv_inputs(case)
    expected = np.asarray(lax_conv(case)(*(np.asarray(a, np.float64) for a in inputs[:2]), None))

    def error(precision):
        y = jax.jit(conv(CUDNN, **case.settings, precision=precision))(*inputs[:2])
        return np.abs(np.asarray(y, np.float64) - expected).max()

    with jax.default_matmul_precision("default"):
        assert error("highest") < 2e-5
        assert error(None) > 1e-4
        assert error((lax.Precision.DEFAULT, lax.Precision.HIGHEST)) < 2e-5
    with jax.default_matmul_precision("highest"):
        assert error(None) < 2e-5


@pytest.mark.parametrize("dtype", DTYPES[:4])
def test_deterministic_kernels_repeat_their_bits(dtype):
    case = ConvCase(spatial=(28, 26), batch=16, features=32, out_features=64, padding="SAME", layout=LAST)
    inputs, dy = make_conv_inputs(case, dtype), cotangent((16, 28, 26, 64), dtype)
    op = conv(CUDNN, **case.settings)
    with config.override(deterministic=True):
        gradients = jax.jit(lambda inputs, dy: jax.vjp(op, *inputs)[1](dy))
        first, *others = (gradients(tuple(inputs), dy) for _ in range(10))
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, other, first)


def test_activations_are_not_copied():
    """With channels last, which cuDNN reads directly, only the weights are transposed."""
    case = CASE.replace(bias=False)
    inputs = make_conv_inputs(case)
    gradient = jax.grad(lambda *inputs: jnp.sum(conv(CUDNN, **case.settings)(*inputs) ** 2), argnums=(0, 1))
    text = jax.jit(gradient).lower(*inputs[:2]).as_text()
    sizes = [line for line in text.splitlines() if "stablehlo.transpose" in line]
    filters = {"x".join(map(str, shape)) for shape in ((3, 2, 8, 16), (16, 3, 2, 8))}
    assert all(any(size in line for size in filters) for line in sizes), sizes
    assert calls(text) == dict.fromkeys(PASSES, 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_features_first_between_convolutions_of_xla(dtype):
    """XLA keeps the arrays between its convolutions as this kernel takes them: no copy is added before and after it."""
    case = ConvCase(spatial=(24, 23), batch=8, features=32, out_features=32, padding="SAME", layout=FIRST, bias=False)
    lhs, rhs = make_conv_inputs(case, dtype)[:2]
    plain = partial(lax.conv_general_dilated, **case.settings)

    def copies(op):
        def loss(rhs, lhs):
            y = jnp.tanh(plain(jnp.tanh(op(jnp.tanh(plain(lhs, rhs)), rhs)), rhs))
            return jnp.sum(y.astype(jnp.float32) ** 2)

        text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(rhs, lhs).compile().as_text()
        found = re.findall(r" = \w+\[([\d,]+)\]\S* (?:copy|transpose)\(", text)
        return sum(math.prod(map(int, sizes.split(","))) == lhs.size for sizes in found)

    assert copies(conv(CUDNN, **case.settings)) <= copies(plain)


_WEIGHTS = {
    "HWIO": ConvCase(spatial=(6, 5), features=64, out_features=96, padding="SAME", layout=LAST),
    "OIHW": ConvCase(spatial=(6, 5), features=40, out_features=48, layout=("NHWC", "OIHW", "NHWC")),
    "lopsided": ConvCase(spatial=(6, 5), features=36, out_features=34, layout=("NHWC", "WOIH", "NHWC")),
    "channels first": ConvCase(spatial=(6, 5), features=33, out_features=70, layout=("NCHW", "HWIO", "NCHW")),
    "odd": ConvCase(spatial=(7, 6), features=3, out_features=37, strides=(2, 1), layout=LAST),
    "groups": ConvCase(spatial=(6, 5), features=32, groups=4, out_features=32, padding="SAME", layout=LAST),
    "depthwise": ConvCase(spatial=(6, 5), features=1, groups=48, out_features=1, padding="SAME", layout=LAST),
    "one axis": ConvCase(spatial=(9,), window=(4,), features=34, out_features=66, layout=("NWC", "WIO", "NWC")),
    "three axes": ConvCase(
        spatial=(4, 5, 3), window=(2, 3, 2), features=34, out_features=36, layout=("NDHWC", "WHDIO", "NDHWC")
    ),
    "three axes, all apart": ConvCase(
        spatial=(4, 5, 3), window=(2, 3, 2), features=18, out_features=20, layout=("NDHWC", "WIHOD", "NDHWC")
    ),
}


def _results(text):
    """The types of dw, of the untransposed dw that cuDNN writes, and of the workspace."""
    line = next(line for line in text.splitlines() if "@jaxgrad_cudnn_conv_weight_gradient" in line)
    return line.partition("->")[2].strip(" ()").split(", ")


@pytest.mark.parametrize("dtype", DTYPES[:4])
@pytest.mark.parametrize("name", _WEIGHTS)
def test_weight_gradients_in_the_callers_layout(name, dtype):
    """A jaxgrad kernel transposes dw from the layout of cuDNN to that of the caller."""
    case = _WEIGHTS[name]
    inputs = make_conv_inputs(case, dtype)
    gradient = jax.grad(lambda rhs: jnp.sum(conv(CUDNN, **case.settings)(inputs.lhs, rhs, inputs.bias)))
    dw, written, _ = _results(jax.jit(gradient).lower(inputs.rhs).as_text())
    by_xla = (
        dtype == "float64" and case.layout[1][-1] not in "OI"
    )  # the last axis is the same window axis in the layout of cuDNN
    if by_xla:
        assert written.startswith("tensor<0x")
    else:
        assert dw.startswith(f"tensor<{'x'.join(map(str, inputs.rhs.shape))}x")
        assert dw != written
        assert not written.startswith("tensor<0x")
    _check(CUDNN, case, dtype)


_UP = TransposeCase(
    spatial=(5, 4), window=(4, 3), strides=(2, 2), features=520, out_features=40, layout=LAST, bias=False
)
_REVERSED = {
    "HWIO": _UP,
    "HWIO, odd": _UP.replace(window=(3, 4), strides=(2, 1), features=33, out_features=35),
    "HWOI": _UP.replace(layout=("NHWC", "HWOI", "NHWC")),
    "window last": _UP.replace(features=34, out_features=38, layout=("NHWC", "IOHW", "NHWC")),
    "one axis": _UP.replace(
        spatial=(9,), window=(5,), strides=(2,), features=520, out_features=24, layout=("NWC", "WIO", "NWC")
    ),
    "three axes, apart": _UP.replace(
        spatial=(3, 4, 2),
        window=(2, 3, 4),
        strides=(2, 1, 2),
        features=18,
        out_features=20,
        layout=("NDHWC", "DIHWO", "NDHWC"),
    ),
    "transposed kernel": _UP.replace(strides=(1, 1), transpose_kernel=True),
}


@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("name", _REVERSED)
def test_reversed_weight_gradients_in_the_callers_layout(name, dtype):
    """For transposed convolutions the jaxgrad kernel also reverses the window; XLA neither reverses nor transposes."""
    case = _REVERSED[name]
    inputs = make_transpose_inputs(case, dtype)
    op = conv_transpose(CUDNN, **case.settings)

    def gradient(lhs, dy):
        return jax.vjp(lambda rhs: op(lhs, rhs), jnp.zeros_like(inputs.rhs))[1](dy)[0]

    text = jax.jit(gradient).lower(inputs.lhs, jax.eval_shape(op, *inputs)).as_text()
    assert calls(text)["weight_gradient"] == 1
    assert "dw_reversed = true" in text
    assert not any(f"stablehlo.{moved}" in text for moved in ("reverse", "transpose"))
    _check(CUDNN, case, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_transposed_weight_gradients_recorded_into_a_command_buffer(dtype):
    """Twelve weight gradients in one program, run thirty times with new inputs."""
    case = ConvCase(spatial=(9, 10), features=72, out_features=136, padding="SAME", layout=LAST, bias=False)
    rhs = make_conv_inputs(case, dtype).rhs
    rng = np.random.default_rng(0)

    def gradients(op, lhs, dys):
        return [jax.vjp(lambda w, i=i: op(lhs * (1 + i), w), rhs)[1](dy)[0] for i, dy in enumerate(dys)]

    lhs, dys = np.zeros((2, 9, 10, 72), dtype), [np.zeros((2, 9, 10, 136), dtype)] * 12
    lowered = jax.jit(partial(gradients, conv(CUDNN, **case.settings))).lower(lhs, dys)
    assert _results(lowered.as_text())[0].startswith("tensor<3x2x72x136x")
    compiled = lowered.compile()
    plain = jax.jit(partial(gradients, lambda x, w: lax.conv_general_dilated(x, w, **case.settings)))
    before = jaxgrad.plan_cache_info()["cudnn"]["recorded"]
    for _ in range(30):
        lhs = jax.device_put(rng.standard_normal(lhs.shape).astype(dtype))
        dys = [jax.device_put(rng.standard_normal(dy.shape).astype(dtype)) for dy in dys]
        for found, expected in zip(compiled(lhs, dys), plain(lhs, dys), strict=True):
            found, expected = (np.asarray(a, np.float32) for a in (found, expected))
            np.testing.assert_allclose(found, expected, rtol=0, atol=0.01 * np.abs(expected).max())
    assert jaxgrad.plan_cache_info()["cudnn"]["recorded"] > before


@pytest.mark.parametrize("search", config.SEARCHES)
def test_a_shape_is_planned_once(search):
    case = CASE.replace(spatial=(17, 19), batch=3)
    inputs = make_conv_inputs(case)
    with config.override(search=search):
        step = jax.jit(jax.grad(lambda *inputs: jnp.sum(conv(CUDNN, **case.settings)(*inputs)), argnums=(0, 1)))
        jax.block_until_ready(step(*inputs))
        before = jaxgrad.plan_cache_info()["cudnn"]
        for _ in range(5):
            jax.block_until_ready(step(*inputs))
        jax.block_until_ready(jax.jit(lambda *inputs: step(*inputs))(*inputs))
    after = jaxgrad.plan_cache_info()["cudnn"]
    assert after["misses"] == before["misses"]
    assert 0 < after["size"] <= after["capacity"]


def test_every_field_of_the_plan_key_matters():
    """Calls that differ in a single setting, one after the other."""
    base = ConvCase(spatial=(12, 13), window=(3, 3), features=4, out_features=4, padding=((1, 1), (1, 1)), layout=LAST)
    changes = [
        {},
        {"strides": (1, 2)},
        {"strides": (2, 1)},
        {"padding": ((0, 2), (1, 1))},
        {"padding": ((2, 0), (1, 1))},
        {"rhs_dilation": (1, 2)},
        {"batch": 3},
        {"groups": 2, "features": 2, "out_features": 2},
        {"layout": FIRST},
        {"spatial": (13, 12)},
    ]
    for change in changes:
        for dtype in ("float32", "float16", "bfloat16"):
            _check(CUDNN, base.replace(**change), dtype)


def test_recorded_into_a_command_buffer():
    """Twenty layers and their gradients in one program, run a hundred times with new inputs."""
    case = ConvCase(
        spatial=(14, 14), window=(3, 3), features=16, out_features=16, padding="SAME", layout=LAST, bias=False
    )
    rhs = jax.device_put([make_conv_inputs(case.replace(seed=i)).rhs for i in range(20)])

    def step(op, lhs, rhs):
        def loss(rhs):
            x = lhs
            for w in rhs:
                x = jnp.tanh(op(x, w))
            return jnp.sum(x**2)

        return jax.value_and_grad(loss)(rhs)

    op = conv(CUDNN, **case.settings)
    compiled = jax.jit(lambda lhs, rhs: step(op, lhs, rhs)).lower(np.zeros((2, 14, 14, 16), np.float32), rhs).compile()
    plain = jax.jit(lambda lhs, rhs: step(lambda x, w: lax.conv_general_dilated(x, w, **case.settings), lhs, rhs))
    rng = np.random.default_rng(0)
    before = jaxgrad.plan_cache_info()["cudnn"]
    for _ in range(100):
        lhs = jax.device_put(rng.standard_normal((2, 14, 14, 16)).astype(np.float32))
        found, expected = compiled(lhs, rhs), plain(lhs, rhs)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-4 * max(1, float(jnp.abs(b).max()))),
            found,
            expected,
        )
        del lhs, found, expected  # frees the memory for the next call; with other addresses XLA would record again
    after = jaxgrad.plan_cache_info()["cudnn"]
    assert after["recorded"] > before["recorded"]  # XLA recorded the calls
    assert after["hits"] - before["hits"] < 100 * 40  # and replayed the recording


_PLANNED_AT_THE_FIRST_RUN = """
import jax, jax.numpy as jnp, numpy as np
from jax import export, lax
from conv_running import PASSES
import jaxgrad
from jaxgrad import config
from jaxgrad._src.native import cuda

assert not cuda.cudnn_unavailable()
cuda.gpu_ordinal = lambda: None  # simulates a machine without a GPU: lowering makes no plan
jax.config.update("jax_default_matmul_precision", "highest")
settings = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
checks = [export.DisabledSafetyCheck.custom_call(f"jaxgrad_cudnn_conv_{kind}") for kind in PASSES]

def step(op, x, w):
    return jax.grad(lambda w: sum(jnp.sum(jnp.tanh(op(x, w[i]))**2) for i in range(8)))(w)

def ours(x, w):
    return step(lambda x, w: jaxgrad.conv_general_dilated(x, w, **settings, implementation="cudnn"), x, w)

expected = jax.jit(lambda x, w: step(lambda x, w: lax.conv_general_dilated(x, w, **settings), x, w))
shapes = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((2, 9, 9, 8), (8, 3, 3, 8, 8))]
rng = np.random.default_rng(0)
for search in ("heuristic", "exhaustive", "fallback"):
    jax.clear_caches()  # traced functions keep the settings of their trace
    before = jaxgrad.plan_cache_info()["cudnn"]
    with config.override(search=search):
        exported = export.export(jax.jit(ours), disabled_checks=checks, platforms=["cuda"])(*shapes)
    assert jaxgrad.plan_cache_info()["cudnn"] == before
    call = jax.jit(exported.call)
    for _ in range(20):
        x, w = (rng.standard_normal(shape.shape).astype(np.float32) / 3 for shape in shapes)
        np.testing.assert_allclose(call(x, w), expected(x, w), rtol=0, atol=2e-4)
    assert jaxgrad.plan_cache_info()["cudnn"]["size"] > before["size"]
    print(search, jaxgrad.plan_cache_info()["cudnn"])
"""


def test_a_program_lowered_without_a_gpu_runs(run_python):
    """Plans are made in the first run, which XLA may record; the workspace is an estimate."""
    run_python(_PLANNED_AT_THE_FIRST_RUN)


@pytest.mark.parametrize("search", ["heuristic", "exhaustive"])
def test_relu_in_the_kernel_recorded_into_a_command_buffer(search):
    """Twelve layers with convolution, bias and relu in one kernel, run thirty times with new inputs."""
    case = ConvCase(spatial=(9, 10), window=(3, 3), features=32, out_features=32, padding=((2, 0), (1, 1)), layout=LAST)
    layers = [make_conv_inputs(case.replace(seed=i), "bfloat16")[1:] for i in range(12)]

    def network(op, lhs):
        for rhs, bias in layers:
            lhs = op(lhs, rhs, bias) / 2
        return lhs

    def plain(*inputs):
        return jax.nn.relu(lax_conv(case)(*inputs))

    op = conv(CUDNN, **case.settings, activation="relu")
    lhs = make_conv_inputs(case, "bfloat16").lhs
    with config.override(search=search):
        explanation = jaxgrad.explain(
            jaxgrad.conv_general_dilated,
            lhs,
            *layers[0][:1],
            **case.settings,
            bias=layers[0][1],
            activation="relu",
            implementation="cudnn",
        )
        assert "bias and relu are fused" in explanation.reason
        lowered = jax.jit(partial(network, op)).lower(lhs)
    assert "relu = true" in lowered.as_text()
    assert "stablehlo.maximum" not in lowered.as_text()
    compiled, expected = lowered.compile(), jax.jit(partial(network, plain))
    before = jaxgrad.plan_cache_info()["cudnn"]
    rng = np.random.default_rng(0)
    for _ in range(30):
        lhs = jax.device_put(rng.standard_normal(lhs.shape).astype(lhs.dtype))
        found, desired = (np.asarray(f(lhs), np.float32) for f in (compiled, expected))
        np.testing.assert_allclose(found, desired, rtol=0, atol=0.05 * np.abs(desired).max())
    assert jaxgrad.plan_cache_info()["cudnn"]["recorded"] > before["recorded"]


@pytest.mark.parametrize("spatial", [(9, 10), (6, 7, 8)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES[:4])
def test_relu_is_fused_into_the_kernel(dtype, spatial):
    """cuDNN has a fused kernel for each of these cases."""
    n = len(spatial)
    layout = {2: LAST, 3: ("NDHWC", "DHWIO", "NDHWC")}[n]
    case = ConvCase(spatial=spatial, window=(3,) * n, features=32, out_features=32, padding="SAME", layout=layout)
    lhs, rhs, bias = make_conv_inputs(case, dtype)
    settings = {**case.settings, "bias": bias, "activation": "relu", "implementation": "cudnn"}
    reason = jaxgrad.explain(jaxgrad.conv_general_dilated, lhs, rhs, **settings, precision="default").reason
    assert "bias and relu are fused" in reason


def test_many_threads():
    cases = [CASE.replace(spatial=(11 + i, 9)) for i in range(8)]

    def work(case):
        for dtype in ("float32", "bfloat16"):
            _check(CUDNN, case, dtype)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, cases))


def test_vmap_of_gradients_matches_a_loop():
    """Independent problems with their own weights: one grouped call."""
    case = CASE.replace(bias=False)
    inputs = [make_conv_inputs(case.replace(seed=i)) for i in range(3)]
    lhs, rhs = (np.stack([getattr(a, name) for a in inputs]) for name in ("lhs", "rhs"))
    op = conv(CUDNN, **case.settings)
    gradient = jax.grad(lambda lhs, rhs: jnp.sum(jnp.sin(op(lhs, rhs))), argnums=(0, 1))
    found = jax.jit(jax.vmap(gradient))(lhs, rhs)
    for i in range(3):
        jax.tree.map(
            lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=0, atol=1e-4), found, gradient(lhs[i], rhs[i])
        )


def test_explain_follows_the_row_for_a_slow_weight_transpose():
    (row,) = (row for row in table.rows("cuda") if row.name == "many weights, 16 bits")
    settings = {"dimension_numbers": LAST, "window_strides": (1, 1), "padding": "SAME"}
    lhs, rhs = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((16, 32, 32, 512), (3, 3, 512, 512)))
    choice = jaxgrad.explain(jaxgrad.conv_general_dilated, lhs, rhs, **settings)
    found = {unit.name: unit.implementation for unit in choice.passes} or {"weight_gradient": choice.implementation}
    assert found["weight_gradient"] == row.prefer
    assert ("row 'many weights, 16 bits'" in str(choice)) or row.prefer == "xla"


def test_explain_reports_each_pass():
    lhs, rhs = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((16, 64, 64, 256), (3, 3, 256, 256)))
    settings = {"dimension_numbers": LAST, "rhs_dilation": (2, 2)}
    choice = jaxgrad.explain(jaxgrad.conv_general_dilated, lhs, rhs, (1, 1), "SAME", **settings)
    assert {unit.name: unit.implementation for unit in choice.passes}["weight_gradient"] == "cudnn"
