"""Selection and lowering for cuDNN, tested without a GPU: programs and the report of `explain`."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from backends import CUDNN, Backend
from conv_cases import ConvCase, make_conv_inputs
from conv_running import PASSES, calls, conv, conv_transpose
from conv_transpose_cases import TransposeCase
from cuda_module import NEEDS_CUDA_MODULE

import jaxgrad
from jaxgrad import config
from jaxgrad._src.core.precision import allows_tf32
from jaxgrad._src.native import cuda

pytestmark = NEEDS_CUDA_MODULE

LAST = ("NHWC", "HWIO", "NHWC")
DEFAULT = Backend(None, "gpu")
PLAIN = ConvCase(spatial=(1024, 1024), window=(3, 3), features=8, out_features=16, padding="SAME", layout=LAST)
VOLUME = ConvCase(spatial=(8, 8, 8), window=(3, 3, 3), features=8, padding="SAME", layout=("NDHWC", "DHWIO", "NDHWC"))
UP = TransposeCase(spatial=(1024, 1024), window=(2, 2), strides=(2, 2), features=8, out_features=16, layout=LAST)


def _arrays(case, dtype):
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in case.shapes)


def _lowered(backend, case, dtype="float32", platform="cuda"):
    op = (conv_transpose if isinstance(case, TransposeCase) else conv)(backend, **case.settings)
    inputs = _arrays(case, dtype)
    gradient = jax.grad(lambda *inputs: jnp.sum(op(*inputs).astype(jnp.float32) ** 2), argnums=(0, 1, 2))
    return jax.jit(gradient).trace(*inputs).lower(lowering_platforms=(platform,)).as_text()


RULES = {
    "plain": (PLAIN, "bfloat16", ()),
    "small": (PLAIN.replace(spatial=(64, 64)), "bfloat16", PASSES),
    "small, without a window": (PLAIN.replace(spatial=(64, 64), window=(1, 1)), "bfloat16", ()),
    "small groups": (PLAIN.replace(spatial=(64, 64), groups=4), "bfloat16", ()),
    "window dilation": (PLAIN.replace(rhs_dilation=(2, 2)), "bfloat16", ("weight_gradient",)),
    "stride": (PLAIN.replace(strides=(2, 2), padding=((1, 1), (1, 1))), "float32", ()),
    "stride and dilation": (
        PLAIN.replace(strides=(2, 2), rhs_dilation=(2, 2), padding=((2, 2), (2, 2))),
        "float32",
        ("weight_gradient",),
    ),
    "windows side by side": (
        PLAIN.replace(window=(4, 4), strides=(4, 4), padding="VALID", out_features=64),
        "bfloat16",
        (),
    ),
    "windows side by side, wide": (
        PLAIN.replace(window=(4, 4), strides=(4, 4), padding="VALID", out_features=64),
        "float32",
        (),
    ),
    "lopsided padding": (PLAIN.replace(strides=(2, 2)), "bfloat16", PASSES),
    "lopsided and dilated": (
        PLAIN.replace(rhs_dilation=(2, 2), padding=((4, 0), (4, 0))),
        "float32",
        PASSES,
    ),
    "groups": (PLAIN.replace(groups=4), "bfloat16", ()),
    "groups and stride": (PLAIN.replace(groups=4, strides=(2, 2)), "bfloat16", PASSES),
    "depthwise and stride": (
        PLAIN.replace(groups=4, features=1, strides=(2, 2)),
        "bfloat16",
        ("forward",),
    ),
    "depthwise and dilation": (
        PLAIN.replace(groups=4, features=1, rhs_dilation=(2, 2)),
        "float32",
        ("input_gradient",),
    ),
    "volume": (VOLUME, "float32", PASSES),
    "few features": (
        PLAIN.replace(features=3, out_features=32, strides=(2, 2)),
        "float32",
        ("forward", "weight_gradient"),
    ),
    "transposed, small windows do not overlap": (UP, "float32", ("input_gradient",)),
    "transposed, windows do not overlap": (
        UP.replace(window=(3, 3), strides=(3, 3)),
        "float32",
        (),
    ),
    "transposed, windows overlap": (UP.replace(window=(4, 4)), "float32", ("input_gradient",)),
    "transposed, no stride": (UP.replace(strides=(1, 1), window=(3, 3)), "float32", ()),
    "groups and stride, evenly padded": (
        PLAIN.replace(groups=4, strides=(2, 2), padding=((1, 1), (1, 1))),
        "bfloat16",
        ("input_gradient",),
    ),
    "volume of few features": (
        VOLUME.replace(spatial=(64, 64, 64), features=3, out_features=32),
        "float32",
        ("forward", "weight_gradient"),
    ),
    "volume of few features, narrow": (
        VOLUME.replace(spatial=(64, 64, 64), features=3, out_features=32),
        "bfloat16",
        PASSES,
    ),
}


@pytest.mark.parametrize(
    ("num_problems", "spatial", "dtype", "products"),
    [
        (9, (64, 64), "bfloat16", 1),
        (8, (32, 32), "bfloat16", 1),
        (
            9,
            (1024, 1024),
            "bfloat16",
            3,
        ),  # products of three window positions each, 150 MB; a single problem runs on XLA
        (9, (512, 512), "float64", 3),  # no platform has a float64 kernel
        (8, (512, 512), "bfloat16", 0),
    ],
)
def test_weight_gradients_of_independent_problems(num_problems, spatial, dtype, products):
    """Matrix products; a few large problems, without strides and dilation, are groups of one convolution."""
    case = PLAIN.replace(spatial=spatial, batch=1)
    op = conv(DEFAULT, **case.settings)
    x, w, _ = _arrays(case, dtype)
    gradient = jax.grad(lambda w, x: jnp.sum(op(x, w).astype(jnp.float32) ** 2))
    xs = jax.ShapeDtypeStruct((num_problems, *x.shape), x.dtype)
    mapped = jax.jit(jax.vmap(gradient, in_axes=(None, 0)))
    text = mapped.trace(w, xs).lower(lowering_platforms=("cuda",)).as_text()
    assert calls(text)["weight_gradient"] == 0
    assert text.count("stablehlo.dot_general") == products
    of_forward = calls(text)["forward"] == 0
    assert text.count("stablehlo.convolution") == of_forward + (products == 0)


@pytest.mark.parametrize("name", RULES)
def test_default_selection(name):
    """The program calls cuDNN for exactly the passes that `explain` reports."""
    case, dtype, expected = RULES[name]
    public = jaxgrad.conv_transpose if isinstance(case, TransposeCase) else jaxgrad.conv_general_dilated
    choice = jaxgrad.explain(public, *_arrays(case, dtype)[:2], **case.settings, platform="gpu")
    selected = {p.name: p.implementation for p in choice.passes} or dict.fromkeys(PASSES, choice.implementation)
    assert {name for name, implementation in selected.items() if implementation == "cudnn"} == set(expected)
    if choice.passes:
        assert all(p.reason in str(choice) and p.name in str(choice) for p in choice.passes)
    needed = {"forward", "input_gradient", "weight_gradient"} & set(expected)
    assert calls(_lowered(DEFAULT, case, dtype)) == {kind: int(kind in needed) for kind in PASSES}


@pytest.mark.parametrize("case", [PLAIN, PLAIN.replace(groups=4), VOLUME, UP], ids=str)
def test_forced_cudnn_runs_every_pass(case):
    text = _lowered(CUDNN, case)
    assert calls(text) == dict.fromkeys(PASSES, 1)
    assert "stablehlo.convolution" not in text


@pytest.mark.parametrize(
    ("capability", "features_last"),
    [
        (None, {"float32 1D", "float32 2D", "bfloat16 1D", "bfloat16 2D"}),
        ((9, 0), {"float32 1D", "float32 2D", "bfloat16 1D", "bfloat16 2D"}),
        ((8, 0), {"bfloat16 2D"}),
    ],
)
def test_features_first(capability, features_last, monkeypatch, request):
    """cuDNN takes the layout that XLA gives to a convolution of this GPU: the arrays around it have it too."""
    request.addfinalizer(jax.clear_caches)  # they hold plans for this GPU
    monkeypatch.setattr(cuda, "compute_capability", lambda: capability)
    found = set()
    with jax.enable_x64(True):
        for dtype, layout in itertools.product(("float64", "float32", "bfloat16"), ("NCW", "NCHW")):
            spatial = (9,) * (len(layout) - 2)
            case = ConvCase(spatial, (3,) * len(spatial), layout=(layout, layout.replace("NC", "OI"), layout))
            jax.clear_caches()
            text = _lowered(CUDNN, case, dtype)
            last, first = (text.count(f"lhs_spec = dense<[0, {axes},") for axes in (len(layout) - 1, 1))
            assert (last, first) in ((3, 0), (0, 3))
            found |= {f"{dtype} {len(spatial)}D"} if last else set()
    assert found == features_last


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ([SimpleNamespace(compute_capability="8.6"), SimpleNamespace(compute_capability="9.0")], (8, 6)),
        ([SimpleNamespace(compute_capability="12.1")], (12, 1)),
        ([SimpleNamespace(compute_capability="10.3a")], (10, 3)),
        ([SimpleNamespace(compute_capability="unknown")], None),
        ([SimpleNamespace()], None),
        ([], None),
    ],
)
def test_compute_capability(devices, expected, monkeypatch):
    monkeypatch.setattr(cuda.jax, "local_devices", lambda backend: devices)
    assert cuda.compute_capability.__wrapped__() == expected


def test_cpu_program_has_no_cudnn_call():
    text = _lowered(DEFAULT, VOLUME, platform="cpu")
    assert "allow_tf32" not in text
    assert "allow_tf32" in _lowered(DEFAULT, VOLUME)


def test_the_settings_reach_the_program(monkeypatch):
    with jax.default_matmul_precision("default"):
        typical = _lowered(CUDNN, PLAIN)
        with config.override(search="fallback", deterministic=True):
            changed = _lowered(CUDNN, PLAIN)
        with config.override(search="heuristic"):
            untimed = _lowered(CUDNN, PLAIN)
        with config.override(search="exhaustive", deterministic=True):
            repeatable = _lowered(CUDNN, PLAIN)
        with monkeypatch.context() as patched:
            patched.setattr(jax, "process_count", lambda: 2)
            jax.clear_caches()
            of_several = _lowered(CUDNN, PLAIN)
    assert "allow_tf32 = true, deterministic = false" in typical
    assert "search = 1 :" in typical
    assert "allow_tf32 = true, deterministic = true" in changed
    assert "search = 2 :" in changed
    assert all("search = 0 :" in text for text in (untimed, repeatable, of_several))
    with jax.default_matmul_precision("highest"):
        assert "allow_tf32 = false" in _lowered(CUDNN, PLAIN)


@pytest.mark.parametrize(
    ("precision", "allowed"),
    [
        (None, True),
        ("default", True),
        ("high", True),
        ("highest", False),
        ("float32", False),
        ("tensorfloat32", True),
        ("F32_F32_F32", False),
        ("BF16_BF16_F32", True),
        (jax.lax.Precision.HIGHEST, False),
        ((jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGHEST), False),
        (["default", "high"], True),
    ],
    ids=str,
)
def test_precision(precision, allowed):
    with jax.default_matmul_precision("default"):
        assert allows_tf32(precision) is allowed


def test_lowering_is_deterministic():
    texts = set()
    for _ in range(3):
        jax.clear_caches()
        texts.add(_lowered(CUDNN, UP))
    assert len(texts) == 1


@pytest.mark.skipif(cuda.gpu_ordinal() is not None, reason="a GPU says how much workspace a call needs")
def test_the_workspace_limit_reaches_the_program():
    with config.override(workspace_limit=12345):
        assert "tensor<12345xui8>" in _lowered(CUDNN, PLAIN)


@pytest.mark.skipif(
    cuda.gpu_ordinal() is not None, reason="on a GPU cuDNN itself reports whether it has a kernel with relu"
)
def test_relu_runs_on_xla_without_a_gpu():
    settings = {**VOLUME.settings, "activation": "relu", "implementation": "cudnn"}
    inputs = _arrays(VOLUME, "bfloat16")
    choice = jaxgrad.explain(jaxgrad.conv_general_dilated, *inputs[:2], **settings, platform="gpu")
    assert "XLA applies relu: without a GPU on this machine cuDNN cannot be asked" in choice.reason
    traced = jax.jit(conv(CUDNN, **VOLUME.settings, activation="relu")).trace(*inputs)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "relu = false" in text
    assert "stablehlo.maximum" in text


def test_explain_rejects_another_platform():
    inputs = make_conv_inputs(PLAIN)[:2]
    with pytest.raises(ValueError, match=r"implementation='cudnn' runs on the platform 'gpu' only, got 'cpu'"):
        jaxgrad.explain(jaxgrad.conv_general_dilated, *inputs, **PLAIN.settings, implementation="cudnn", platform="cpu")
    with pytest.raises(
        ValueError, match=r"jaxgrad.gru: implementation='cudnn' cannot run: the implementations of this op are"
    ):
        jaxgrad.explain(jaxgrad.gru, implementation="cudnn", platform="gpu")


def test_unsupported_calls_are_rejected_with_a_reason():
    inputs = make_conv_inputs(PLAIN, "float32")
    lhs, rhs = (a.astype("int32") for a in inputs[:2])
    with pytest.raises(ValueError, match=r"implementation='cudnn' cannot run: the dtype int32 runs on XLA"):
        jaxgrad.conv_general_dilated(lhs, rhs, **PLAIN.settings, implementation="cudnn")


_FAKE = """
import ctypes, subprocess, sys, tempfile
from jaxgrad._src.native import cuda
source = "#include <stddef.h>\\nextern \\"C\\" size_t cudnnGetVersion() {{ return {version}; }}"
folder = tempfile.mkdtemp()
library = folder + "/libcudnn.so.9"
subprocess.run(["g++", "-shared", "-fPIC", "-Wl,-soname,libcudnn.so.9", "-x", "c++", "-", "-o", library],
               input=source, text=True, check=True)
ctypes.CDLL(library, ctypes.RTLD_GLOBAL)  # simulates that JAX has loaded it
import jax, jaxgrad, warnings
cuda.gpu_ordinal = lambda: 0
lhs, rhs = jax.ShapeDtypeStruct((2, 8, 8, 4), "float32"), jax.ShapeDtypeStruct((3, 3, 4, 4), "float32")
call = lhs, rhs, (1, 1), "SAME", None, (2, 2), ("NHWC", "HWIO", "NHWC")
choice = jaxgrad.explain(jaxgrad.conv_general_dilated, *call, platform="gpu")
assert choice.implementation == "xla" and not choice.passes, choice
print(choice.reason)
try:
    jaxgrad.explain(jaxgrad.conv_general_dilated, *call, platform="gpu", implementation="cudnn")
except RuntimeError as error:
    assert choice.reason in str(error), error
else:
    raise SystemExit("implementation='cudnn' was not refused")
import runpy
runpy.run_module("jaxgrad", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        (90100, "cuDNN 9.1.0 was found; jaxgrad needs 9.8.0 or a later release of major version 9"),
        (100200, "cuDNN 10.2.0 was found; jaxgrad needs 9.8.0"),
        (91900, "the cuDNN that was found has no function cudnnBackendCreateDescriptor"),
    ],
)
def test_unusable_cudnn(run_python, version, problem):
    """Too old, too new or incomplete: calls run on XLA, forced calls raise, and the report has the reason."""
    text = run_python(_FAKE.format(version=version), JAX_PLATFORMS="cpu").stdout
    assert f"the cuDNN kernels are missing: {problem}" in text
    assert f"cuDNN         missing: {problem}" in text


_MISSING = """
from jaxgrad._src.native import cuda
cuda._CUDNN_PACKAGES = ()
print(cuda.cudnn_unavailable())
"""


def test_missing_cudnn(run_python):
    text = run_python(_MISSING, JAX_PLATFORMS="cpu").stdout.strip()
    if not text:
        pytest.skip("this system has a cuDNN of its own")
    assert text.startswith("cuDNN cannot be opened: libcudnn.so.9")


_WITHOUT_MODULE = """
import sys
sys.modules["jaxgrad._cuda"] = None  # simulates a CPU-only build
import jax, jaxgrad
lhs, rhs = jax.ShapeDtypeStruct((2, 8, 8, 4), "float32"), jax.ShapeDtypeStruct((3, 3, 4, 4), "float32")
call = lhs, rhs, (1, 1), "SAME", None, (2, 2), ("NHWC", "HWIO", "NHWC")
choice = jaxgrad.explain(jaxgrad.conv_general_dilated, *call, platform="gpu")
assert choice.implementation == "xla" and "no CUDA module" in choice.reason, choice
assert list(jaxgrad.plan_cache_info()) == ["onednn"]
try:
    jaxgrad.explain(jaxgrad.conv_general_dilated, *call, platform="gpu", implementation="cudnn")
except RuntimeError as error:
    assert "no CUDA module" in str(error), error
else:
    raise SystemExit("implementation='cudnn' was not refused")
import runpy
runpy.run_module("jaxgrad", run_name="__main__")
"""


def test_cpu_only_build(run_python):
    assert "CUDA kernels  missing" in run_python(_WITHOUT_MODULE, JAX_PLATFORMS="cpu").stdout
