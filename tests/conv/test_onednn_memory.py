"""Kernels of oneDNN that write outside of their arrays or lose a sum do not run. `.ci/sanitize` searches for others."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgrad
from jaxgrad._src.conv.call.geometry import ConvGeometry
from jaxgrad._src.conv.call.problem import ConvProblem
from jaxgrad._src.conv.kernels.onednn import onednn_plan

_NHWC = (0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2)
_NCHW = ((0, 1, 2, 3),) * 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("specs", [_NHWC, _NCHW], ids=["NHWC", "NCHW"])
@pytest.mark.parametrize("features", [1, 3, 7, 9, 15])
@pytest.mark.parametrize("strides", [(2, 1), (3, 2)])
def test_weight_gradients_of_strided_1x1_windows(strides, features, specs, dtype):
    """The 1x1 kernels write past their scratchpad with fewer features than a vector: 8 with AVX2, 16 with AVX-512."""
    x_spatial = strides[0] * 16, strides[1] * 17
    g = ConvGeometry(*specs, strides, ((0, 0), (0, 0)), (1, 1), 1, x_spatial, (1, 1))
    plan = onednn_plan("weight_gradient", ConvProblem(g, 3, features, 16, jnp.dtype(dtype)), False)
    if plan is None:
        assert dtype == "bfloat16"  # jaxgrad computes in float32 on processors without such kernels
        return
    vector = 16 if "avx512" in plan.kernel else 8
    assert features >= vector or "_1x1" not in plan.kernel
    assert not plan.kernel.startswith("ref"), "the pass would run on XLA"


_EVERY_OP = """
import jax, jaxgrad, numpy as np
from jax import lax
rng = np.random.default_rng(0)
LAST = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC")}

def arrays(x, w, dtype="float32"):
    return tuple(jax.numpy.asarray(rng.integers(-3, 4, shape), dtype) for shape in (x, w))

def conv(op, strides, **settings):
    return lambda x, w: op(x, w, strides, "VALID", dimension_numbers=LAST[len(strides)], **settings)

def gradient(function, x, w):
    return jax.grad(lambda w: (function(x, w) * np.float32(2)).sum())(w)

ours, plain, onednn = jaxgrad.conv_general_dilated, lax.conv_general_dilated, {"implementation": "onednn"}
images = arrays((4, 32, 30, 3), (1, 1, 3, 16))
cases = [  # the function, the same of jax.lax, the arrays
    (conv(ours, (2, 2), **onednn), conv(plain, (2, 2)), images),
    (conv(ours, (2, 2), **onednn), conv(plain, (2, 2)), arrays((4, 32, 30, 3), (1, 1, 3, 16), "bfloat16")),
    (conv(ours, (3,), **onednn), conv(plain, (3,)), arrays((5, 96, 7), (1, 7, 9))),
    (conv(ours, (1, 2), feature_group_count=2, **onednn), conv(plain, (1, 2), feature_group_count=2),
     arrays((2, 9, 40, 6), (1, 1, 3, 16))),
    (conv(jaxgrad.conv_transpose, (2, 2), **onednn), conv(lax.conv_transpose, (2, 2)),
     arrays((4, 16, 15, 16), (1, 1, 16, 3))),
    (jaxgrad.accelerate(conv(plain, (2, 2))), conv(plain, (2, 2)), images),
]
mapped = [  # over the images, the weights, or both; jaxgrad has a kernel of its own for smaller ones
    (conv(ours, (2, 1), **onednn), conv(plain, (2, 1)), arrays((3, 4, 64, 50, 2), (1, 1, 2, 16)), (0, None)),
    (conv(ours, (2, 1), **onednn), conv(plain, (2, 1)), arrays((3, 4, 64, 50, 2), (3, 1, 1, 2, 16)), (0, 0)),
]

def gradients(which):
    found = [gradient(case[which], *case[2]) for case in cases]
    for *functions, operands, axes in mapped:
        found.append(jax.vmap(lambda x, w, call=functions[which]: gradient(call, x, w), axes)(*operands))
    return found

for found, expected in zip(jax.jit(lambda: gradients(0))(), jax.jit(lambda: gradients(1))(), strict=True):
    rtol = 2**-7 if found.dtype == "bfloat16" else 1e-6
    np.testing.assert_allclose(np.asarray(found, "float32"), np.asarray(expected, "float32"), rtol=rtol)
print("calls", len(cases) + len(mapped))
"""


def test_no_op_runs_such_a_kernel(run_python):
    """With AVX2, by the log of oneDNN: conv, conv_transpose, groups, vmap, accelerate."""
    text = run_python(_EVERY_OP, JAX_PLATFORMS="cpu", ONEDNN_MAX_CPU_ISA="AVX2", ONEDNN_VERBOSE="1").stdout
    kernels = re.findall(r"convolution,([\w:]+),backward_weights,", text)
    assert len(kernels) >= int(re.search(r"calls (\d+)", text)[1]), text
    assert not [kernel for kernel in kernels if "_1x1" in kernel], kernels


def test_bfloat16_input_gradients_of_an_odd_number_of_products():
    """With 30 positions, jit_bf16_1x1:avx512_core_bf16 loads the last product into a register that holds a sum."""
    rng = np.random.default_rng(0)
    x, w, dy = (jnp.asarray(rng.integers(-3, 4, s), "bfloat16") for s in ((2, 9, 40, 9), (1, 1, 9, 7), (2, 3, 10, 7)))
    settings = {"rhs_dilation": (2, 2), "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    results = [
        jax.vjp(lambda x, call=call: call(x, w, (3, 4), "VALID", **settings), x)[1](dy)[0].astype("float32")
        for call in (
            lambda *a, **k: jaxgrad.conv_general_dilated(*a, implementation="onednn", **k),
            jax.lax.conv_general_dilated,
        )
    ]
    np.testing.assert_array_equal(*results)
