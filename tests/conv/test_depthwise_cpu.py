"""The CPU kernels of depthwise convolutions: random problems against float64, padding, threads, and what runs them."""

from __future__ import annotations

import itertools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import CPU_KERNEL, ONEDNN, Backend
from conv_cases import ConvCase, cotangent, make_conv_inputs
from conv_references import in_float64, lax_conv
from conv_running import assert_same, conv, run, terms
from mesh_running import import_test_module
from preferring import with_instruction_set
from thorough import one_in, thorough_after

import jaxgrad
from jaxgrad._src.choice import table
from jaxgrad._src.choice.measured_choices import Recorder
from jaxgrad._src.conv.measurable import measurable_pass
from jaxgrad._src.native import cpu

LAYOUTS = {
    1: (("NWC", "WIO", "NWC"), ("NCW", "OIW", "NCW"), ("NWC", "OIW", "NCW"), ("WNC", "IWO", "NCW")),
    2: (("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("NCHW", "HWIO", "NHWC"), ("HWNC", "OHWI", "CNHW")),
    3: (
        ("NDHWC", "DHWIO", "NDHWC"),
        ("NCDHW", "OIDHW", "NCDHW"),
        ("NDHWC", "OIDHW", "NCDHW"),
        ("DNHWC", "OIDHW", "NDHWC"),
    ),
}
SIZES, WINDOWS = {1: 70, 2: 21, 3: 9}, {1: 14, 2: 6, 3: 4}
PASSES = {"forward", "input_gradient", "weight_gradient"}


def depthwise_case(seed: int) -> ConvCase:
    """A random depthwise problem. The channels are often not a multiple of a vector, and windows larger than x."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 4))

    def sizes(low, high):
        return tuple(int(size) for size in rng.integers(low, high + 1, n))

    while True:
        spatial, window = sizes(1, SIZES[n]), sizes(1, WINDOWS[n])
        strides = sizes(1, 3) if rng.random() < 0.6 else (1,) * n
        dilation = sizes(1, 4) if rng.random() < 0.4 else (1,) * n
        padding = tuple(tuple(int(p) for p in rng.integers(-1, 7, 2)) for _ in range(n))
        extents = [(k - 1) * d + 1 for k, d in zip(window, dilation, strict=True)]
        padded = [size + sum(pads) for size, pads in zip(spatial, padding, strict=True)]
        cropped = [size + sum(min(p, 0) for p in pads) for size, pads in zip(spatial, padding, strict=True)]
        if min(cropped) > 0 and all(k <= size for k, size in zip(extents, padded, strict=True)):
            break
    channels = int(rng.choice([2, 3, 7, 16, 17, 32, 40, 48, 64, 75]))
    layout = LAYOUTS[n][int(rng.integers(4))]
    return ConvCase(
        spatial, window, int(rng.integers(1, 5)), 1, 1, channels, strides, padding, None, dilation, layout, seed=seed
    )


def assert_runs_kernel(case: ConvCase, dtype: str) -> None:
    """All passes run on the kernel, and nothing on oneDNN."""
    arrays = [None if a is None else jnp.asarray(a) for a in make_conv_inputs(case, dtype)]
    call = conv(CPU_KERNEL, **case.settings)
    text = jax.jit(lambda *a: jax.vjp(call, *a)[1](call(*a))).lower(*arrays).as_text()
    assert "onednn" not in text
    assert {name for name in PASSES if f"jaxgrad_cpu_depthwise_{name}" in text} == PASSES


@pytest.mark.parametrize("seed", thorough_after(14, range(300)))
def test_values_and_gradients(seed):
    case, dtype = depthwise_case(seed), ("float32", "bfloat16", "float16")[seed % 3]
    inputs, plain = make_conv_inputs(case, dtype), lax_conv(case)
    y = jax.eval_shape(plain, *inputs)
    dy = cotangent(y.shape, dtype, seed)
    assert_runs_kernel(case, dtype)
    actual = run(conv(CPU_KERNEL, **case.settings), inputs, dy)
    assert_same(actual, in_float64(plain, inputs, dy), dtype=dtype, terms=terms(inputs, y), message=f"{dtype} {case}")


# Sizes at which the kernels divide a call: rows of several tiles, boxes that are copied in parts, parts of sums.
LARGE = {
    "1D": ConvCase((3001,), (31,), 2, 1, 1, 18, padding="SAME", layout=("NWC", "WIO", "NWC")),
    "1D, many taps": ConvCase((301,), (120,), 2, 1, 1, 18, padding="SAME", layout=("NWC", "WIO", "NWC")),
    "1D, many taps, strided": ConvCase((301,), (90,), 2, 1, 1, 18, (2,), "SAME", layout=("NWC", "WIO", "NWC")),
    "1D, features first": ConvCase((9001,), (4,), 1, 1, 1, 18, padding=((3, 0),)),
    "1D, dilated": ConvCase(
        (700,), (3,), 3, 1, 1, 20, padding="SAME", rhs_dilation=(64,), layout=("NWC", "WIO", "NWC")
    ),
    "2D": ConvCase((61, 53), (7, 5), 9, 1, 1, 17, padding="SAME", layout=("NHWC", "HWIO", "NHWC")),
    "2D, features first": ConvCase((103, 111), (3, 3), 3, 1, 1, 17, (2, 2), "SAME"),
    "2D, large window": ConvCase((37, 41), (31, 29), 1, 1, 1, 16, padding="SAME", layout=("NHWC", "HWIO", "NHWC")),
    "2D, one tap with a dilation": ConvCase((21, 19), (1, 5), 2, 1, 1, 18, padding="SAME", rhs_dilation=(2**63 - 1, 2)),
    "2D, narrow": ConvCase((9, 7), (7, 5), 3, 1, 1, 75, padding="SAME", layout=("NHWC", "HWIO", "NHWC")),
    "2D, narrow, few taps": ConvCase((8, 6), (3, 3), 3, 1, 1, 75, padding="SAME", layout=("NHWC", "HWIO", "NHWC")),
    "2D, narrow, strided": ConvCase((13, 14), (5, 5), 2, 1, 1, 69, (2, 2), "SAME", layout=("NHWC", "HWIO", "NHWC")),
    "3D": ConvCase((9, 31, 29), (3, 3, 3), 2, 1, 1, 19, padding="SAME"),
    "3D, many taps": ConvCase((5, 14, 17), (3, 5, 6), 2, 1, 1, 40, padding="SAME", layout=("NDHWC", "DHWIO", "NDHWC")),
    "3D, features last": ConvCase(
        (7, 20, 17), (3, 3, 3), 2, 1, 1, 54, padding="SAME", layout=("NDHWC", "DHWIO", "NDHWC")
    ),
}


@pytest.mark.parametrize("name", one_in(2, LARGE))
def test_large_problems(name):
    case = LARGE[name]
    inputs, plain = make_conv_inputs(case), lax_conv(case)
    y = jax.eval_shape(plain, *inputs)
    dy = cotangent(y.shape, "float32")
    actual = run(conv(CPU_KERNEL, **case.settings), inputs, dy)
    with jax.enable_x64(True):  # a matrix product for each tap: the weight gradient of jax.lax takes minutes
        wide = type(inputs)(*(np.asarray(a, np.float64) for a in inputs))
        exact = run(
            lambda x, w, b: jaxgrad.conv_general_dilated(x, w, **case.settings, bias=b, implementation="xla"),
            wide,
            dy.astype(np.float64),
        )
    assert_same(actual, exact, dtype="float32", terms=terms(inputs, y), message=name)


_INSTRUCTION_SETS = """
for seed in (1, 4, 9, 11):
    test_depthwise_cpu.test_values_and_gradients(seed)
for name in ("1D, many taps", "2D", "2D, narrow, few taps"):
    test_depthwise_cpu.test_large_problems(name)
print(cpu.build_info()["instruction_set"])
"""


@pytest.mark.parametrize("name", ["avx2", "baseline"])
def test_lesser_instruction_sets(run_python, name):
    script = import_test_module(__file__, "test_depthwise_cpu") + "from jaxgrad._src.native import cpu\n"
    found = run_python(script + _INSTRUCTION_SETS, JAX_PLATFORMS="cpu", JAXGRAD_CPU_ISA=name).stdout.split()[-1]
    if found != name:
        pytest.skip(f"this machine has {found} only")


# The spatial axes have the sizes at the end of these, and so do the window and the padding.
SPATIAL, WINDOW, PADDING = (4, 7, 21), (3, 2, 5), ((1, 0), (2, 1), (4, 3))
NON_FINITE = [
    *itertools.product((1, 2, 3), (False, True), (1, 2), ("float32",)),
    *itertools.product((1,), (False, True), (1, 2), ("bfloat16",)),
]


@pytest.mark.parametrize(("n", "features_last", "stride", "dtype"), NON_FINITE)
def test_non_finite_values_stay_where_the_window_reads_them(n, features_last, stride, dtype):
    """Padding is skipped: an infinite weight or cotangent times the zero of padding would be NaN."""
    layout = LAYOUTS[n][0 if features_last else 1]
    case = ConvCase(SPATIAL[-n:], WINDOW[-n:], 2, 1, 1, 18, (stride,) * n, PADDING[-n:], layout=layout)
    inputs = make_conv_inputs(case, dtype)
    dy = np.array(cotangent(jax.eval_shape(lax_conv(case), *inputs).shape, dtype))
    x, w = np.array(inputs.lhs), np.array(inputs.rhs)
    batch_and_feature, spatial = case.numbers.lhs_spec[:2], case.numbers.lhs_spec[2:]
    for array, channel, index, value in (
        (x, 3, -1, np.nan),
        (x, 17, 0, np.inf),
        (dy, 5, 0, np.inf),
        (dy, 16, -1, np.nan),
    ):
        at = np.zeros(n + 2, int)
        at[batch_and_feature[1]], at[list(spatial)] = channel, index
        array[tuple(at)] = value
    for channel, tap, value in ((9, 0, np.inf), (10, -1, np.nan)):
        at = np.zeros(n + 2, int)
        at[case.numbers.rhs_spec[0]], at[list(case.numbers.rhs_spec[2:])] = channel, tap
        w[tuple(at)] = value
    actual = run(conv(CPU_KERNEL, **case.settings), inputs._replace(lhs=x, rhs=w), dy)
    expected = _direct_sums(case, *(np.asarray(a, np.float64) for a in (x, w, dy)))
    for name, exact in zip(("y", "dx", "dw"), expected, strict=True):
        found = np.asarray({"y": actual.y, "dx": actual.lhs, "dw": actual.rhs}[name], np.float64)
        assert not np.isfinite(exact).all(), name
        np.testing.assert_array_equal(np.isnan(found), np.isnan(exact), err_msg=name)
        np.testing.assert_array_equal(np.isinf(found), np.isinf(exact), err_msg=name)


def _direct_sums(case, x, w, dy):
    """y, dx and dw without the bias, as sums over the elements that a window reads."""
    numbers, axes = case.numbers, range(case.n + 2)
    x_, dy_ = (np.moveaxis(a, spec, axes) for a, spec in ((x, numbers.lhs_spec), (dy, numbers.out_spec)))
    w_ = np.moveaxis(w, numbers.rhs_spec, axes)[:, 0]
    y, dx, dw = np.zeros(dy_.shape), np.zeros(x_.shape), np.zeros(w_.shape)
    for o, k in itertools.product(np.ndindex(dy_.shape[2:]), np.ndindex(w_.shape[1:])):
        i = tuple(a * s + b - low for a, s, b, (low, _) in zip(o, case.strides, k, case.padding, strict=True))
        if all(0 <= place < size for place, size in zip(i, x_.shape[2:], strict=True)):
            y[:, :, *o] += x_[:, :, *i] * w_[:, *k]
            dx[:, :, *i] += dy_[:, :, *o] * w_[:, *k]
            dw[:, *k] += (x_[:, :, *i] * dy_[:, :, *o]).sum(0)
    return (
        np.moveaxis(y, axes, numbers.out_spec),
        np.moveaxis(dx, axes, numbers.lhs_spec),
        np.moveaxis(dw[:, None], axes, numbers.rhs_spec),
    )


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_relu_is_fused(layout):
    case = ConvCase(
        (9, 8), (3, 3), 2, 1, 1, 5, padding="SAME", layout=(layout, "HWIO" if layout == "NHWC" else "OIHW", layout)
    )
    inputs = make_conv_inputs(case)
    inputs.lhs[0] = np.nan
    call = jax.jit(conv(CPU_KERNEL, **case.settings, activation="relu"))
    text = call.lower(*inputs).as_text()
    assert "relu = true" in text
    assert "maximum" not in text
    linear = conv(CPU_KERNEL, **case.settings)(*inputs)
    np.testing.assert_array_equal(call(*inputs), np.maximum(linear, 0))


_SCRIPT = """
import hashlib, os
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
import jax, jax.numpy as jnp, numpy as np
import jaxgrad
for axes, window, strides, features_last in (
    ("HW", (5, 3), (1, 2), True), ("HW", (5, 3), (1, 2), False), ("HW", (7, 5), (1, 1), True),
    ("DHW", (3, 3, 5), (1, 1, 1), True),
):
    layout, weights = (f"N{axes}C", f"{axes}IO") if features_last else (f"NC{axes}", f"OI{axes}")
    sizes = (31, 29) if axes == "HW" else (6, 14, 17)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, *sizes, 35) if features_last else (5, 35, *sizes)).astype(np.float32)
    w = rng.standard_normal((*window, 1, 35) if features_last else (35, 1, *window)).astype(np.float32)
    b = rng.standard_normal(35).astype(np.float32)
    def op(x, w, b):
        return jaxgrad.conv_general_dilated(x, w, strides, "SAME", dimension_numbers=(layout, weights, layout),
                                            feature_group_count=35, bias=b, implementation="cpu")
    y, vjp = jax.vjp(op, x, w, b)
    for array in (y, *vjp(jnp.cos(y))):
        print(hashlib.sha256(np.asarray(array).tobytes()).hexdigest())
"""


def test_results_do_not_depend_on_threads(run_python):
    """XLA's thread pool has as many threads as the process may use processors when JAX starts."""
    one, several = (run_python(_SCRIPT.replace("THREADS", n), JAX_PLATFORMS="cpu").stdout for n in ("1", "3"))
    assert one == several
    assert len(one.split()) == 16


@pytest.fixture
def prefer(monkeypatch):
    """Puts rows for depthwise convolutions before the table: the implementation, the passes and a condition of each."""
    rows = table.rows
    jax.clear_caches()

    def put(*wanted):
        first = tuple(
            table.Row("", "conv", tuple(passes), {"problems": {"at_least": 0}, **when}, name, name, None, "")
            for name, passes, when in wanted
        )
        monkeypatch.setattr(table, "rows", lambda platform: (*first, *rows(platform)))

    yield put
    jax.clear_caches()


CASE = ConvCase((9, 8), (5, 5), 2, 1, 1, 5, padding="SAME")


def targets(case, implementation=None, in_axes=None):
    """The passes of a call whose program calls oneDNN, and those whose program calls the kernels."""
    call, inputs = conv(Backend(implementation, "cpu"), **case.settings), make_conv_inputs(case)

    def gradients(*arrays):
        return jax.vjp(call, *arrays)[1](call(*arrays))

    if in_axes is not None:
        inputs = [np.stack([a] * 3) if axis == 0 else a for a, axis in zip(inputs, in_axes, strict=True)]
        gradients = jax.vmap(gradients, in_axes)
    text = jax.jit(gradients).lower(*inputs).as_text()
    return tuple({n for n in PASSES if f"jaxgrad_{lib}_{n}" in text} for lib in ("onednn_conv", "cpu_depthwise"))


@pytest.mark.parametrize("name", ["avx512", "avx2"])
def test_runs_without_onednn(monkeypatch, name):
    """Depthwise convolutions run on the kernels, whichever is the faster one; others need oneDNN."""
    monkeypatch.setattr(cpu, "onednn_unavailable", lambda: "oneDNN is not installed")
    jax.clear_caches()
    few_positions = CASE.replace(spatial=(20, 20), groups=400)
    with with_instruction_set(name), warnings.catch_warnings():
        warnings.simplefilter("error")  # the call has no use for oneDNN
        for case in (
            CASE,
            few_positions,
            few_positions.replace(strides=(2, 2)),
            few_positions.replace(rhs_dilation=(2, 2)),
        ):
            assert targets(case) == (set(), PASSES)
    with pytest.raises(RuntimeError, match="the kernels of oneDNN are missing"):
        conv(ONEDNN, **CASE.settings)(*make_conv_inputs(CASE))
    jax.clear_caches()


@pytest.mark.parametrize("own", [set(), {"weight_gradient"}, PASSES])
def test_the_faster_kernel_runs(prefer, own):
    prefer(("cpu", own, {}), ("onednn", PASSES - own, {}))
    inputs = make_conv_inputs(CASE)
    found = jaxgrad.explain(jaxgrad.conv_general_dilated, *inputs[:2], **CASE.settings, platform="cpu")
    passes = {p.name: p for p in found.passes} or dict.fromkeys(PASSES, found)
    assert {name: p.implementation for name, p in passes.items()} == {
        n: "cpu" if n in own else "onednn" for n in PASSES
    }
    assert {p.reason for p in passes.values()} <= {"jaxgrad's own kernel", "oneDNN"}
    assert targets(CASE) == (PASSES - own, own)
    assert targets(CASE, "onednn") == (PASSES, set())
    assert targets(CASE, "cpu") == (set(), PASSES)


_IMAGES, _WEIGHTS, _BOTH = (0, None, None), (None, 0, None), (0, 0, None)


@pytest.mark.parametrize("in_axes", [_IMAGES, _WEIGHTS, _BOTH], ids=str)
@pytest.mark.parametrize("first", ["cpu", "onednn"])
def test_vmap_may_change_the_kernel(prefer, first, in_axes):
    """A row that prefers the other kernel for the sizes that `vmap` makes: more positions, or independent problems."""
    other = {"cpu": "onednn", "onednn": "cpu"}[first]
    few = {"positions": {"at_most": CASE.batch * 9 * 8}, "problems": 0}
    prefer((first, PASSES, few), (other, PASSES, {}))
    assert targets(CASE) == targets(CASE, first) == targets(CASE, first, in_axes)
    assert targets(CASE, None, in_axes) == targets(CASE, other)


def test_vmap_leaves_a_pass_on_xla(prefer):
    prefer(("xla", PASSES, {"positions": {"at_most": CASE.batch * 9 * 8}}), ("cpu", PASSES, {}))
    assert targets(CASE) == targets(CASE, None, _IMAGES) == (set(), set())


def test_tune_measures_both_kernels():
    recorder = Recorder()
    with jaxgrad.config.override(tuning=recorder):
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in make_conv_inputs(CASE)]
        jax.jit(conv(Backend(None, "cpu"), **CASE.settings)).lower(*shapes)
    (recorded,) = recorder.calls.values()
    found = measurable_pass(recorded.pass_name, recorded.call, "cpu").functions
    texts = {name: jax.jit(found[name]).lower(*shapes).as_text() for name in found}
    kernels = {name: re.findall(r"@jaxgrad_(cpu_depthwise|onednn_conv)_", text) for name, text in texts.items()}
    assert kernels == {"xla": [], "cpu": ["cpu_depthwise"], "onednn": ["onednn_conv"]}
