"""Layouts of activations other than NHWC and NCHW, and sizes near 2^31, on oneDNN."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

import jaxgrad
from jaxgrad._src.conv.call.geometry import ConvGeometry
from jaxgrad._src.conv.call.problem import ConvProblem
from jaxgrad._src.conv.kernels.onednn import onednn_plan

_LAYOUTS = ("HWNC", "NWHC", "HNWC", "CNHW", "CHWN", "NCWH", "NHCW")


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("layout", _LAYOUTS)
def test_every_layout_runs_on_optimized_kernels(layout, window):
    """These kernels do not read such activations: the plans copy them to another layout."""
    sizes = {"N": 3, "H": 14, "W": 11, "C": 32}
    ours = partial(jaxgrad.conv_general_dilated, implementation="onednn")
    rng = np.random.default_rng(0)
    x = rng.standard_normal([sizes[axis] for axis in layout]).astype("float32")
    w = rng.standard_normal((window, window, 32, 48)).astype("float32")
    settings = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": (layout, "HWIO", layout)}
    dy = np.cos(np.arange(x.size // 32 * 48, dtype="float32")).reshape([{**sizes, "C": 48}[axis] for axis in layout])

    @partial(jax.jit, static_argnums=0)
    def values(conv):
        y, pullback = jax.vjp(partial(conv, **settings), x, w)
        return y, *pullback(dy)

    actual, expected = values(ours), values(jax.lax.conv_general_dilated)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize(
    ("strides", "padding"), [((2**31 - 1,), (1, 1)), ((2**30,), (2**31 - 1, 2**31 - 1)), ((1,), (2**31 - 9, 1))]
)
@pytest.mark.parametrize("pass_name", ["forward", "input_gradient", "weight_gradient"])
def test_sums_of_sizes_beyond_int_have_no_plan(pass_name, strides, padding):
    """oneDNN adds them as int. The forward pass of one position has no stride."""
    spec = (0, 2, 1)
    g = ConvGeometry(spec, (2, 1, 0), spec, strides, (padding,), (1,), 1, (8,), (3,))
    plan = onednn_plan(pass_name, ConvProblem(g, 1, 16, 16, np.dtype("float32")), False)
    assert plan is None or (pass_name == "forward" and g.y_spatial == (1,))
