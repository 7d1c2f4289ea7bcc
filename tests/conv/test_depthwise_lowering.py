"""Selection of the CUDA kernels of depthwise convolutions, with the fake driver and NVRTC of fake_cuda.c.

No GPU is needed.
"""

from __future__ import annotations

import pytest
from cuda_module import NEEDS_CUDA_MODULE

pytestmark = NEEDS_CUDA_MODULE

NOT_DEPTHWISE = "jaxgrad's own kernel is for depthwise convolutions with a channel multiplier of 1"

_PRELUDE = """
import ctypes, json, os, warnings
import jax, jax.numpy as jnp
fake = ctypes.CDLL("libcuda.so.1")
import jaxgrad
from jaxgrad._src.native import cuda

cuda.gpu_ordinal = lambda: 0
LAST, FIRST = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")

def arrays(groups=32, dtype="float32", layout=LAST, features=32):
    shapes = {LAST: ((8, 56, 56, features), (7, 7, features // groups, features)),
              FIRST: ((8, features, 56, 56), (features, features // groups, 7, 7))}
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes[layout]]

def settings(groups=32, layout=LAST, **kwargs):
    return {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": layout,
            "feature_group_count": groups, **kwargs}

def lowered(implementation=None, mapped=False, layout=LAST, **kwargs):
    "The program of the weights' gradient."
    def gradient(x, w):
        call = lambda w: jaxgrad.conv_general_dilated(x, w, **settings(layout=layout), implementation=implementation)
        return jax.grad(lambda w: jnp.sum(call(w).astype("float32") ** 2))(w)
    x, w = arrays(layout=layout, **kwargs)
    if mapped:
        x = jax.ShapeDtypeStruct((x.shape[0], 1, *x.shape[1:]), x.dtype)
        gradient = jax.vmap(gradient, (0, None))
    return jax.jit(gradient).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()

def unit(implementation=None, **kwargs):
    "The implementation of the weight gradient, and its reason."
    groups = kwargs.get("groups", 32)
    layout = kwargs.get("layout", LAST)
    choice = jaxgrad.explain(jaxgrad.conv_general_dilated, *arrays(**kwargs), **settings(groups, layout),
                             implementation=implementation, platform="gpu")
    found = {u.name: [u.implementation, u.reason] for u in choice.passes}
    return found.get("weight_gradient", [choice.implementation, choice.reason])

def error(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except (RuntimeError, ValueError) as raised:
        return f"{type(raised).__name__}: {raised}"
    return ""

def report(**found):
    print(json.dumps(found))
"""


@pytest.fixture
def run(on_fake_cuda):
    """Runs a script in a process of its own and returns the values that it passes to `report`."""

    def run(script, **environment):
        return on_fake_cuda(_PRELUDE + script, **{"FAKE_ENGINES": "11:100:30", **environment})

    return run


def _calls(text):
    """The calls of the kernel in a lowered program."""
    return [
        line for line in text.splitlines() if "custom_call" in line and "jaxgrad_cuda_depthwise_weight_gradient" in line
    ]


def test_program_and_explanation(run):
    """One call of each pass. Lowering compiles the kernels once for all programs."""
    found = run("""
texts = [lowered() for _ in range(2)]
jax.clear_caches()
texts.append(lowered())
report(texts=texts, unit=unit(), compilations=fake.fake_compilations(), forced=lowered("cuda"),
       forced_unit=unit("cuda"),
       whole=str(jaxgrad.explain(jaxgrad.conv_general_dilated, *arrays(), **settings(), platform="gpu")))
""")
    assert len(set(found["texts"])) == 1
    assert len(_calls(found["texts"][0])) == len(_calls(found["forced"])) == 1
    assert found["unit"] == ["cuda", "jaxgrad's own kernel"]
    assert found["forced_unit"] == ["cuda", "forced by implementation='cuda'"]
    assert (
        "'cuda' (jaxgrad's own kernel; row 'depthwise with a large window, channels last in memory'" in found["whole"]
    )
    assert found["compilations"] == 3  # the forward pass, the weight gradient, and the empty program that tests NVRTC


def test_every_pass_runs_on_the_kernels(run):
    """Bias and relu are part of the call of the forward pass."""
    found = run("""
x, w = arrays()
bias = jax.ShapeDtypeStruct((32,), "float32")
call = lambda x, w, b: jaxgrad.conv_general_dilated(x, w, bias=b, activation="relu", **settings(),
                                                    implementation="cuda")
gradient = jax.grad(lambda *a: call(*a).sum(), argnums=(0, 1))
choice = jaxgrad.explain(jaxgrad.conv_general_dilated, x, w, bias=bias, activation="relu", **settings(),
                         platform="gpu")
report(text=jax.jit(gradient).trace(x, w, bias).lower(lowering_platforms=("cuda",)).as_text(),
       value=jax.jit(call).trace(x, w, bias).lower(lowering_platforms=("cuda",)).as_text(),
       units={u.name: [u.implementation, u.reason] for u in choice.passes})
""")
    assert "stablehlo.convolution" not in found["text"]
    for name in ("forward", "input_gradient", "weight_gradient"):
        assert found["text"].count(f"@jaxgrad_cuda_depthwise_{name}") == 1
        assert found["units"][name][0] == "cuda"
    assert "relu = true" in found["value"]
    assert "stablehlo.maximum" not in found["value"]
    assert found["units"]["forward"][1] == "jaxgrad's own kernel; bias and relu are fused"


def test_stride_and_dilation_on_one_axis(run):
    """The kernel of the input gradient takes no axis with both. The other passes still run on the kernels."""
    found = run("""
call = lambda x, w, **kwargs: jaxgrad.conv_general_dilated(x, w, (2, 1), "SAME", rhs_dilation=(2, 2),
                                                           dimension_numbers=LAST, feature_group_count=32, **kwargs)
def gradients(x, w):
    return jax.grad(lambda x, w: jnp.sum(call(x, w) ** 2), (0, 1))(x, w)
report(text=jax.jit(gradients).trace(*arrays(dtype="bfloat16")).lower(lowering_platforms=("cuda",)).as_text(),
       forced=error(jax.eval_shape, lambda x, w: call(x, w, implementation="cuda"), *arrays()))
""")
    passes = [f"@jaxgrad_cuda_depthwise_{name}" for name in ("forward", "input_gradient", "weight_gradient")]
    assert [found["text"].count(name) for name in passes] == [1, 0, 1]
    assert "input gradients with a stride and dilation along the same axis" in found["forced"]


def test_dense_convolutions_are_rejected(run):
    found = run(
        """
def other(**kwargs):
    return jaxgrad.conv_general_dilated(*(jnp.zeros(a.shape, a.dtype) for a in arrays(**kwargs)),
                                        **settings(kwargs["groups"]), implementation="cuda")
report(unit=unit(groups=4), dense=error(other, groups=4), wide=error(other, groups=32, dtype="float64"),
     compilations=fake.fake_compilations())
""",
        JAX_ENABLE_X64="1",
    )
    assert found["unit"][0] != "cuda"
    assert "own kernel" not in found["unit"][1]
    cannot = "ValueError: jaxgrad.conv_general_dilated: implementation='cuda' cannot run: "
    assert (
        found["dense"] == cannot + "jaxgrad's own kernel is for depthwise convolutions with a channel multiplier of 1"
    )
    reason = "the depthwise kernel does not support this convolution: it does not support float64"
    assert found["wide"] == cannot + reason
    assert found["compilations"] == 0


def test_multipliers_above_one_and_odd_channels(run):
    """Another implementation is selected. With a forced implementation, `explain` raises the reason."""
    found = run("""
def explained(channels, multiplier, dtype, implementation=None):
    x = jax.ShapeDtypeStruct((8, 28, 28, channels), dtype)
    w = jax.ShapeDtypeStruct((7, 7, 1, channels * multiplier), dtype)
    return str(jaxgrad.explain(jaxgrad.conv_general_dilated, x, w, **settings(channels), platform="gpu",
                               implementation=implementation))
calls = dict(multiplier=(32, 2, "float32"), odd=(33, 1, "bfloat16"), odd_half=(33, 1, "float16"),
             odd_float=(33, 1, "float32"), even=(34, 1, "bfloat16"))
report(selected={name: explained(*call) for name, call in calls.items()},
       forced={name: error(explained, *call, "cuda") for name, call in calls.items()})
""")
    odd = "the channels of a pixel must be a multiple of 4 bytes"
    for name, reason in (("multiplier", NOT_DEPTHWISE), ("odd", odd), ("odd_half", odd)):
        assert found["forced"][name].endswith(reason)
        assert "'cuda'" not in found["selected"][name]
    for name in ("odd_float", "even"):
        assert "'cuda'" in found["selected"][name]
        assert found["forced"][name] == ""


@pytest.mark.parametrize(("capability", "forward"), [((9, 0), "cuda"), ((8, 0), "xla")])
def test_channels_first(run, capability, forward):
    """The kernel takes channels last, as XLA does on new GPUs. On others the transposes pay where XLA is slow."""
    found = run(f"""
cuda.compute_capability = lambda: {capability}
def forward():
    inputs, parameters = arrays(layout=FIRST), settings(layout=FIRST)
    choice = jaxgrad.explain(jaxgrad.conv_general_dilated, *inputs, **parameters, platform="gpu")
    return {{p.name: p.implementation for p in choice.passes}}.get("forward", choice.implementation)
report(wide=unit(layout=FIRST)[0], narrow=unit(layout=FIRST, dtype="bfloat16")[0], forward=forward(),
       texts=[lowered(layout=FIRST), lowered("cuda", layout=FIRST, dtype="bfloat16")])
""")
    assert (found["wide"], found["narrow"], found["forward"]) == ("cuda", "cuda", forward)
    for text in found["texts"]:
        assert len(_calls(text)) == 1
        assert text.count("stablehlo.transpose") >= 2


def test_vmap_folds_problems_into_channels(run):
    found = run("report(text=lowered(mapped=True))")
    (call,) = _calls(found["text"])
    assert "feature_group_count = 256" in call  # 8 problems of 32 channels


_FAILS = """
jax.default_backend = lambda: "gpu"  # the platform for which jaxgrad warns
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    texts = [lowered(), lowered(dtype="bfloat16")]
forced = error(lowered, "cuda")
report(texts=texts, warned=[str(w.message) for w in caught if w.category is RuntimeWarning], forced=forced, unit=unit(),
     dense=unit(groups=4))
"""


def _check_fails(found, problem):
    """The next candidate is selected, with one warning; forced calls raise. All messages have the reason."""
    assert not any(map(_calls, found["texts"]))
    assert found["unit"][0] in ("xla", "cudnn")
    assert f"the CUDA kernels of jaxgrad are missing: {problem}" in found["unit"][1]
    (warned,) = found["warned"]
    assert warned.startswith(f"jaxgrad runs on cuDNN or XLA because the CUDA kernels of jaxgrad are missing: {problem}")
    cannot = "RuntimeError: jaxgrad.conv_general_dilated: implementation='cuda' cannot run: "
    assert found["forced"].startswith(f"{cannot}the CUDA kernels of jaxgrad are missing: {problem}")
    assert "CUDA kernels" not in found["dense"][1]


def test_failing_compiler(run):
    _check_fails(run(_FAILS, FAKE_NVRTC="6"), "NVRTC: NVRTC_ERROR_COMPILATION for sm_90: the fake has a log")


def test_nvrtc_newer_than_the_driver(run):
    """NVRTC of CUDA 12 is needed and missing; the driver cannot load code from the NVRTC of CUDA 13."""
    _check_fails(run(_FAILS, FAKE_DRIVER="12080"), "NVRTC cannot be opened; libnvrtc.so.12: cannot open")


def test_gpu_without_room_for_the_tiles(run):
    found = run("report(unit=unit(), text=lowered(), forced=error(lowered, 'cuda'))", FAKE_SHARED="1000")
    assert found["unit"][0] == "xla"
    assert not _calls(found["text"])
    assert "ValueError" in found["forced"]
    assert "too large for the GPU" in found["forced"]


def test_not_selected_without_a_gpu(run_python):
    script = """
import jax, jaxgrad
x, w = jax.ShapeDtypeStruct((8, 56, 56, 32), "float32"), jax.ShapeDtypeStruct((7, 7, 1, 32), "float32")
call = x, w, (1, 1), "SAME", None, None, ("NHWC", "HWIO", "NHWC"), 32
print(jaxgrad.explain(jaxgrad.conv_general_dilated, *call, platform="gpu"))
try:
    jaxgrad.explain(jaxgrad.conv_general_dilated, *call, platform="gpu", implementation="cuda")
except ValueError as error:
    print(error)
"""
    typical, forced = run_python(script, JAX_PLATFORMS="cpu").stdout.splitlines()
    assert "'cuda'" not in typical
    assert forced.endswith("compiled for the GPU of the machine that lowers the program, which has none")


def test_the_diagnosis(run):
    found = run("""
import contextlib, io
from jaxgrad import __main__
report(report=dict(__main__._cuda()))
""")
    assert found["report"]["NVRTC"] == "13.0"
    assert "jaxgrad_cuda_depthwise_weight_gradient" in found["report"]["CUDA handlers"]


def test_forced_call_lowers_for_a_gpu_only(run):
    """Also the value, which XLA computes: the call requires a GPU."""
    found = run("""
x, w = arrays()
call = lambda x, w: jaxgrad.conv_general_dilated(x, w, **settings(), implementation="cuda")
gradient = jax.grad(lambda x, w: call(x, w).sum(), argnums=1)
lower = lambda function, platform: jax.jit(function).trace(x, w).lower(lowering_platforms=(platform,))
report(**{p: [error(lower, function, p) for function in (call, gradient)] for p in ("cuda", "cpu")})
""")
    message = (
        "ValueError: jaxgrad.conv_general_dilated: implementation='cuda' runs on the platform 'gpu' only, got 'cpu'"
    )
    assert found["cuda"] == ["", ""]
    assert [error.splitlines()[0] for error in found["cpu"]] == [message] * 2
