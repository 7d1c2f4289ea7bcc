"""Weight gradients of cuDNN in the caller's layout: which the call transposes and reverses, and which XLA.

With the fake cuDNN of fake_cuda.c; no GPU is needed.
"""

from __future__ import annotations

import pytest
from cuda_module import NEEDS_CUDA_MODULE

pytestmark = NEEDS_CUDA_MODULE

_TRANSPOSED = """
import ctypes, json
import jax, jax.numpy as jnp
fake = ctypes.CDLL("libcudnn.so.9")
import jaxgrad
from jaxgrad._src.native import cuda

cuda.gpu_ordinal = lambda: 0  # JAX itself runs on the CPU
jaxgrad.config.update(search="exhaustive")

def report(**found):
    print(json.dumps(found))

def weight_gradient(rhs_layout, size=8, features=4, out_features=6, dtype="bfloat16", implementation="cudnn"):
    x = jax.ShapeDtypeStruct((2, size, size, features), dtype)
    sizes = {"H": 3, "W": 2, "I": features, "O": out_features}
    w = jax.ShapeDtypeStruct(tuple(sizes[axis] for axis in rhs_layout), dtype)
    layout = ("NHWC", rhs_layout, "NHWC")
    settings = {"window_strides": (1, 1), "padding": ((1, 1), (1, 1)), "dimension_numbers": layout}

    def step(x, w):
        op = lambda w: jaxgrad.conv_general_dilated(x, w, **settings, implementation=implementation)
        return jax.grad(lambda w: jnp.sum(jnp.sin(op(w))))(w)

    explanation = jaxgrad.explain(
        jaxgrad.conv_general_dilated, x, w, **settings, implementation=implementation, platform="gpu"
    )
    own = [unit for unit in explanation.passes if unit.name == "weight_gradient"] or [explanation]
    text = jax.jit(step).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    (line, *_) = [line for line in text.splitlines() if "@jaxgrad_cudnn_conv_weight_gradient" in line] or [""]
    return {
        "called": bool(line),
        "written": line.partition("->")[2].strip(" ()").split(", "),
        "transposed": text.count("stablehlo.transpose"),
        "preference": own[0].preference,
        "compiled": fake.fake_compilations(),
    }
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_weight_gradient_is_written_in_the_callers_layout(on_fake_cuda, dtype):
    """Results: dw, the untransposed dw of cuDNN (empty if no transposition is needed), and the workspace."""
    layouts = ("OHWI", "OIHW", "OWHI", "HWIO", "WOIH")
    script = f"report(**{{layout: weight_gradient(layout, dtype={dtype!r}) for layout in {layouts}}})"
    found = on_fake_cuda(_TRANSPOSED + script, JAX_ENABLE_X64="1")
    element = {"bfloat16": "bf16", "float32": "f32", "float64": "f64"}[dtype]
    sizes = {"H": 3, "W": 2, "I": 4, "O": 6}

    def shape(layout):
        return f"tensor<{'x'.join(str(sizes[axis]) for axis in layout)}x{element}>"

    for layout in layouts:
        window = "".join(axis for axis in layout if axis in "HW")
        of_cudnn = f"OI{window}" if dtype == "float64" else f"O{window}I"
        by_xla = layout[-1] == of_cudnn[-1]  # the last axis does not move, or nothing moves
        expected = [shape(of_cudnn), f"tensor<0x{element}>"] if by_xla else [shape(layout), shape(of_cudnn)]
        assert found[layout]["written"] == [*expected, "tensor<300xui8>"], layout
    assert (
        found["WOIH"]["compiled"] == 3
    )  # an empty program that tests NVRTC, one that checks engines, one for all layouts


_REVERSED = """
def weight_gradient(rhs_layout="HWIO", dtype="bfloat16", layout="NHWC", strides=(2, 2), transpose_kernel=False):
    "What the program of a transposed convolution's weight gradient alone does with dw."
    sizes = {"N": 2, "C": 4, "H": 8, "W": 8}
    x = jax.ShapeDtypeStruct(tuple(sizes[axis] for axis in layout), dtype)
    sizes = {"H": 3, "W": 2, "I": 6 if transpose_kernel else 4, "O": 4 if transpose_kernel else 6}
    w = jax.ShapeDtypeStruct(tuple(sizes[axis] for axis in rhs_layout), dtype)
    numbers = layout, rhs_layout, layout

    def op(x, w):
        return jaxgrad.conv_transpose(
            x, w, strides, "SAME", None, numbers, transpose_kernel, implementation="cudnn"
        )

    def gradient(x, dy):
        return jax.vjp(lambda w: op(x, w), jnp.zeros(w.shape, dtype))[1](dy)[0]

    traced = jax.jit(gradient).trace(x, jax.eval_shape(op, x, w))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return {
        "call_reverses": "dw_reversed = true" in text,
        "reversed": text.count("stablehlo.reverse"),
        "transposed": text.count("stablehlo.transpose"),
    }
"""


def test_conv_transpose_weight_gradient_is_reversed_in_its_call(on_fake_cuda):
    """If the call transposes dw, it also reverses the window; otherwise XLA does, as on the CPU and on XLA."""
    script = """
report(
    typical=weight_gradient(),
    wide=weight_gradient(dtype="float32"),
    by_rows=weight_gradient("HWOI"),
    window_last=weight_gradient("IOHW"),
    unit_strides=weight_gradient(strides=(1, 1), transpose_kernel=True),
    of_cudnns_layout=weight_gradient("IHWO"),
    features_first=weight_gradient("OIHW", layout="NCHW"),
    transposed_kernel=weight_gradient(transpose_kernel=True),
)
"""
    found = on_fake_cuda(_TRANSPOSED + _REVERSED + script)
    in_the_call = {"call_reverses": True, "reversed": 0, "transposed": 0}
    for name in ("typical", "wide", "by_rows", "window_last", "unit_strides"):
        assert {key: found[name][key] for key in in_the_call} == in_the_call, name
    # XLA transposes x and dy.
    assert found["features_first"] == {**in_the_call, "transposed": 2}
    older_gpu = """
cuda.compute_capability = lambda: (8, 0)
report(rows_of_the_window=weight_gradient("OIHW", layout="NCHW", dtype="float32"))
"""
    of_cudnns_layout = {
        "of_cudnns_layout": found["of_cudnns_layout"],
        **on_fake_cuda(_TRANSPOSED + _REVERSED + older_gpu),
    }
    for name, program in of_cudnns_layout.items():
        assert not program["call_reverses"], name
        assert program["reversed"] == 1, name
    assert found["transposed_kernel"] == {"call_reverses": False, "reversed": 0, "transposed": 0}
    lost = on_fake_cuda(_TRANSPOSED + _REVERSED + "report(lost=weight_gradient())", FAKE_NVRTC="6")["lost"]
    assert lost == {**found["typical"], "call_reverses": False, "reversed": 1, "transposed": 1}


def test_xla_transposes_weights_without_nvrtc(on_fake_cuda):
    script = _TRANSPOSED + "report(one=weight_gradient('HWIO'), another=weight_gradient('HWIO', size=9))"
    own, _ = on_fake_cuda(script).values()
    assert own["written"][:2] == ["tensor<3x2x4x6xbf16>", "tensor<6x3x2x4xbf16>"]
    lost, another = on_fake_cuda(script, FAKE_NVRTC="6").values()
    assert lost["written"] == ["tensor<6x3x2x4xbf16>", "tensor<0xbf16>", "tensor<300xui8>"]
    assert lost["transposed"] == own["transposed"] + 1
    assert another["compiled"] == 2  # both were tried once: an empty program, and the one that checks engines


def test_many_narrow_weights_run_on_cudnn(on_fake_cuda):
    """Only where XLA takes long to transpose this weight gradient: with a table that prefers cuDNN for such calls."""
    script = """
import dataclasses
from jaxgrad._src.choice import table

rows = table.rows

def with_cudnn(platform):
    prefer = lambda row: "cudnn" if row.name == "many weights, 16 bits" else row.prefer
    return tuple(dataclasses.replace(row, prefer=prefer(row)) for row in rows(platform))

table.rows = with_cudnn
many = {"size": 1024, "features": 96, "out_features": 512, "implementation": None}
report(
    narrow=weight_gradient("HWIO", **many),
    wide=weight_gradient("HWIO", dtype="float32", **many),
    few=weight_gradient("HWIO", **{**many, "features": 80}),
    few_features=weight_gradient("HWIO", **{**many, "out_features": 504}),
    padded=weight_gradient("HWIO", **{**many, "features": 100}),
    as_cudnn_has_them=weight_gradient("OHWI", **many),
)
"""
    found = on_fake_cuda(_TRANSPOSED + script)
    assert {name: one["called"] for name, one in found.items()} == {
        "narrow": True,
        "wide": False,
        "few": False,
        "few_features": False,
        "padded": False,
        "as_cudnn_has_them": False,
    }
    assert found["narrow"]["preference"].startswith("row 'many weights, 16 bits' of the table ")
    without = on_fake_cuda(_TRANSPOSED + script, FAKE_NVRTC="6")
    assert not any(one["called"] for one in without.values())
