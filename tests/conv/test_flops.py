"""The count of floating-point operations, against a loop over all positions and against XLA's own count."""

from __future__ import annotations

import functools
import itertools

import jax
import numpy as np
import pytest
from jax import export, lax

import jaxgrad
from jaxgrad._src.conv.call.flops import count_flops

CASES = {
    "same": {"padding": "SAME"},
    "strides, pairs": {"window_strides": (3, 2), "padding": ((2, 1), (0, 4))},
    "input dilation": {"padding": ((3, 2), (1, 1)), "lhs_dilation": (2, 3), "window_strides": (1, 2)},
    "both dilations": {
        "padding": ((4, 3), (2, 5)),
        "lhs_dilation": (4, 2),
        "rhs_dilation": (2, 3),
        "window_strides": (6, 4),
    },
    "negative padding": {"padding": ((-1, -2), (1, -3)), "rhs_dilation": (2, 1)},
    "groups": {"padding": "SAME", "feature_group_count": 3},
    "groups of the batch": {"padding": "VALID", "batch_group_count": 2},
}


@pytest.mark.parametrize("name", CASES)
def test_report_and_xla(name):
    settings = {"window_strides": (1, 1), **CASES[name]}
    groups = settings.get("feature_group_count", 1)
    x, w = (jax.ShapeDtypeStruct(s, np.float32) for s in ((4, 6, 9, 11), (6, 6 // groups, 3, 4)))

    def conv(x, w):
        return lax.conv_general_dilated(x, w, **settings)

    found = jaxgrad.report(conv, x, w, platform="cpu")
    assert found.flops == found.convolutions[0].flops == jax.jit(conv).lower(x, w).cost_analysis()["flops"]
    _, *gradients = jaxgrad.report(jax.grad(lambda x, w: conv(x, w).sum(), (0, 1)), x, w, platform="cpu").convolutions
    assert {c.flops for c in gradients} == {found.flops}


def test_against_a_loop():
    for x, w, stride, low, lhs_dilation, dilation in itertools.product(
        (1, 5), (1, 4), (1, 2, 6), (-1, 3), (1, 4), (1, 3)
    ):
        extent = (x - 1) * lhs_dilation + 1 + low + 2 - ((w - 1) * dilation + 1)
        y = max(extent // stride + 1, 0)
        positions = (o * stride + k * dilation - low for o in range(y) for k in range(w))
        products = sum(0 <= i <= (x - 1) * lhs_dilation and i % lhs_dilation == 0 for i in positions)
        one = ((x,), (w,), (y,), (stride,), ((low, 2),), (lhs_dilation,), (dilation,))
        assert count_flops(3, 5, *one) == 2 * 3 * 5 * products, (x, w, stride, low, lhs_dilation, dilation)


def test_symbolic_shapes():
    x = jax.ShapeDtypeStruct(export.symbolic_shape("b, 6, 9, 11"), np.float32)
    found = jaxgrad.report(lambda x: lax.conv(x, np.ones((4, 6, 3, 3), np.float32), (1, 1), "SAME"), x, platform="cpu")
    assert found.flops is None
    assert found.share is None
    assert found.summary.startswith("the arithmetic is unknown: shapes are symbolic; ")
    assert "  -  " in str(found).splitlines()[1]


@pytest.mark.parametrize("implementation", ["onednn", "xla"])
def test_ops(implementation):
    """The passes of the op, also for independent problems, have the flops of `jax.lax`."""

    def gradients(conv):
        def loss(x, w):
            return (conv(x, w, (2, 1), "SAME", feature_group_count=3) ** 2).sum()

        return jax.vmap(jax.grad(loss, (0, 1)))

    x, w = jax.ShapeDtypeStruct((5, 4, 6, 9, 11), np.float32), jax.ShapeDtypeStruct((5, 6, 2, 3, 4), np.float32)
    op = functools.partial(jaxgrad.conv_general_dilated, implementation=implementation)
    found, expected = (jaxgrad.report(gradients(f), x, w, platform="cpu").flops for f in (op, lax.conv_general_dilated))
    assert found == expected
