"""Depthwise convolutions of no images."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from backends import CPU_KERNEL, CUDA, Backend
from conv_cases import ConvCase, cotangent, make_conv_inputs
from conv_references import lax_conv
from conv_running import conv, run

BACKENDS = (CPU_KERNEL, CUDA)


@pytest.mark.parametrize("layout", [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")], ids=lambda layout: layout[0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_empty_batch(backend, dtype, layout):
    """It runs on XLA: the gradients of the weights and of the bias are zeros."""
    case = ConvCase((15, 14), (3, 5), 0, 1, 1, 24, (2, 1), ((1, 0), (0, 2)), layout=layout)
    inputs = make_conv_inputs(case, dtype)
    dy = cotangent(jax.eval_shape(lax_conv(case), *inputs).shape, dtype)
    with pytest.raises(ValueError, match="an array without elements runs on XLA"):
        conv(backend, **case.settings)(*inputs)
    found = run(conv(Backend(None, backend.platform), **case.settings), inputs, dy)
    assert found.y.shape == dy.shape
    for gradient, operand in zip(found[1:], inputs, strict=True):
        assert gradient.dtype == operand.dtype
        np.testing.assert_array_equal(gradient, np.zeros(operand.shape))
