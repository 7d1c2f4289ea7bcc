"""Convolutions that XLA itself miscompiles: wrong paddings, and forms on which its compiler aborts the process."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest
from backends import Backend
from conv_cases import ConvCase, ConvInputs, cotangent, make_conv_inputs, result_sizes
from conv_running import Result, assert_same, conv, terms
from thorough import thorough_after

from jaxgrad._src.conv.on_xla.faults import is_miscompiled, is_or_derives_miscompiled

pytestmark = pytest.mark.jax_version


def _by_taps(case, x, w, dy):
    """y, dx and dw in NumPy, in the default layout: sums over the taps of the window, of an x that is padded first."""
    strides, spread, dilation = (v or (1,) * case.n for v in (case.strides, case.lhs_dilation, case.rhs_dilation))
    padded, found = _padded(x, case.padding, spread)
    sizes, groups = dy.shape[2:], case.groups
    dy = dy.reshape(dy.shape[0], groups, -1, *sizes)
    grouped = w.reshape(groups, -1, *w.shape[1:])
    y, dpadded, dw = np.zeros(dy.shape), np.zeros(padded.shape), np.zeros(grouped.shape)
    for tap in itertools.product(*map(range, case.window)):
        places = zip(tap, dilation, sizes, strides, strict=True)
        met = (..., *(slice(t * d, t * d + (size - 1) * s + 1, s) for t, d, size, s in places))
        elements = padded[met].reshape(x.shape[0], groups, -1, *sizes)
        y += np.einsum("ngi...,goi->ngo...", elements, grouped[(..., *tap)])
        dpadded[met] += np.einsum("ngo...,goi->ngi...", dy, grouped[(..., *tap)]).reshape(padded[met].shape)
        batch = np.moveaxis(elements, 0, -1).reshape(*elements.shape[1:3], -1)
        dw[(..., *tap)] = np.einsum("gis,gos->goi", batch, np.moveaxis(dy, 0, -1).reshape(*dy.shape[1:3], -1))
    dx = np.zeros(x.shape)
    np.add.at(dx.reshape(-1), found[found >= 0], dpadded[found >= 0])
    return y.reshape(y.shape[0], -1, *sizes), dx, dw.reshape(w.shape)


def _padded(x, padding, spread):
    """x dilated and padded; and for each of its elements the index of the element of x, or -1."""
    index = np.arange(x.size).reshape(x.shape)
    for axis, ((low, high), factor) in enumerate(zip(padding, spread, strict=True), start=2):
        shape = list(index.shape)
        shape[axis] = (shape[axis] - 1) * factor + 1
        dilated = np.full(shape, -1)
        dilated[(slice(None),) * axis + (slice(None, None, factor),)] = index
        sides = [(0, 0)] * x.ndim
        sides[axis] = max(low, 0), max(high, 0)
        kept = np.arange(max(0, -low), shape[axis] + max(low, 0) + max(high, 0) + min(0, high))
        kept = kept if low < 0 else np.arange(0, shape[axis] + low + max(high, 0) + min(0, high))
        index = np.take(np.pad(dilated, sides, constant_values=-1), kept, axis)
    return np.where(index < 0, 0, x.reshape(-1)[index]), index


def _negative_case(seed):
    """A random convolution with negative or excessive padding, so small that XLA runs it, and a nonempty result."""
    rng = np.random.default_rng([seed, 7])
    while True:
        n, kind = int(rng.choice([1, 2, 2, 2])), rng.choice(["plain"] * 5 + ["strided", "dilated", "spread", "both"])
        strides, spread, dilation = (tuple(map(int, sizes)) for sizes in rng.integers(1, 4, (3, n)))
        case = ConvCase(
            spatial=tuple(map(int, rng.integers(3, 10, n))),
            window=tuple(map(int, rng.integers(1, 5, n))),
            batch=int(rng.choice([1, 2])),
            features=int(rng.choice([1, 2])),
            out_features=int(rng.choice([1, 3])),
            groups=int(rng.choice([1, 1, 1, 2])),
            strides=strides if kind in ("strided", "both") else None,
            lhs_dilation=spread if kind in ("spread", "both") else None,
            rhs_dilation=dilation if kind == "dilated" else None,
            padding=tuple((int(low), int(high)) for low, high in rng.integers(-3, 5, (n, 2))),
            seed=seed,
        )
        if min(result_sizes(case)) > 0:
            return case


def check_paddings(implementation):
    for seed in range(25):
        case = _negative_case(seed)
        x, w, _ = make_conv_inputs(case)
        op = conv(Backend(implementation, "cpu"), **case.settings)
        dy = cotangent(jax.eval_shape(op, x, w).shape, "float32", seed)
        y, (dx, dw) = jax.jit(lambda dy, *inputs, op=op: (op(*inputs), jax.vjp(op, *inputs)[1](dy)))(dy, x, w)
        expected = Result(*_by_taps(case, *(np.asarray(a, np.float64) for a in (x, w, dy))), None)
        size = terms(ConvInputs(x, w), y)
        assert_same(Result(y, dx, dw, None), expected, dtype="float32", terms=size, message=str(case))


@pytest.mark.parametrize("implementation", thorough_after(1, [None, "xla"]))
def test_padding_is_cropped_first(run_python, implementation):
    """XLA for the CPU is wrong where low padding is negative and high padding positive (jaxlib 0.10.2 and 0.11.2)."""
    script = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nimport test_xla_faults\n"
    run_python(f"{script}test_xla_faults.check_paddings({implementation!r})", JAX_DISABLE_MOST_OPTIMIZATIONS="0")


def test_what_is_miscompiled_is_also_avoided_by_the_ops():
    rng = np.random.default_rng(0)
    counts = Counter()
    for _ in range(3000):
        sizes = [tuple(map(int, rng.integers(1, 6, 2))) for _ in range(3)]
        factors = [tuple(map(int, rng.integers(1, 4, 2))) for _ in range(3)]
        padding = tuple(map(tuple, rng.integers(-2, 4, (2, 2)).tolist()))
        for platform in ("cpu", "cuda"):
            if is_miscompiled(sizes, factors, padding, platform):
                counts[platform] += 1
                assert is_or_derives_miscompiled(sizes, factors, padding), (sizes, factors, padding)
    assert counts["cpu"] > counts["cuda"] > 0


def test_padding_that_xla_computes_correctly():
    """Positive padding at the low end and negative padding at the high end, as in JAX's weight gradients."""
    sizes, ones = ((33,), (3,), (31,)), ((1,), (1,), (1,))
    assert not is_miscompiled(sizes, ones, ((1, -1),), "cpu")
    assert is_miscompiled(sizes, ones, ((-1, 1),), "cpu")
    assert not is_miscompiled(sizes, ones, ((-1, 1),), "cuda")


_ABORTING = """
import jax, jax.numpy as jnp, numpy as np, jaxgrad

layout = ("CHWN", "IHWO", "CHWN")
calls = {
    "input gradient": ((3, 6, 7, 2), (3, 2, 3, 4), (2, 1), ((1, 1), (0, 0)), None, (1, 3), jnp.float32),
    "value": ((3, 5, 2, 2), (3, 2, 5, 4), (1, 1), ((0, 0), (4, 4)), (2, 1), None, jnp.float32),
    "integers": ((3, 5, 2, 2), (3, 2, 5, 4), (1, 1), ((0, 0), (4, 4)), (2, 1), None, jnp.int32),
    "input dilation and strides": ((3, 5, 2, 2), (3, 3, 5, 4), (2, 1), ((0, 0), (4, 4)), (3, 1), None, jnp.float32),
    "windows over padding only": ((128, 2, 5, 1), (128, 1, 4, 256), (1, 1), ((1, -2), (0, 0)), None, None, jnp.float32),
    "wide padding": ((3, 7, 7, 2), (3, 2, 3, 4), (2, 1), ((2, 1), (0, 0)), None, (1, 3), jnp.float32),
    "wider padding": ((3, 6, 7, 2), (3, 2, 3, 4), (2, 1), ((3, 1), (0, 0)), None, (1, 3), jnp.float32),
    "an unread row": ((3, 7, 7, 2), (3, 2, 3, 4), (2, 1), ((4, 2), (0, 0)), None, (1, 3), jnp.float32),
    "weight gradient": ((3, 3, 9, 2), (3, 4, 2, 4), (1, 1), ((0, 0), (0, 0)), (2, 1), None, jnp.float32),
}
rng = np.random.default_rng(0)
for name, (x, w, strides, padding, lhs_dilation, rhs_dilation, dtype) in calls.items():
    x, w = (jnp.asarray(rng.integers(-4, 5, shape), dtype) for shape in (x, w))
    rest = (strides, padding, lhs_dilation, rhs_dilation, layout)
    for implementation in (None, "xla"):
        def op(x, w):
            return jaxgrad.conv_general_dilated(x, w, *rest, implementation=implementation)
        if dtype == jnp.int32:
            jax.jit(op)(x, w)
            continue
        y, pullback = jax.vjp(op, x, w)
        dy = jnp.asarray(rng.integers(-4, 5, y.shape), dtype)
        dx, dw = pullback(dy)
        # The three passes are one trilinear form of dy, x and w.
        products = [float(jnp.vdot(a, b)) for a, b in ((y, dy), (dx, x), (dw, w))]
        np.testing.assert_allclose(products, products[0], rtol=1e-5, err_msg=name)
        jax.jit(jax.grad(lambda x, w: jnp.vdot(jax.vjp(op, x, w)[1](dy)[1], w), (0, 1)))(x, w)
    print(name)
"""


def test_convolutions_on_which_the_compiler_aborts(run_python):
    """XLA's swap of the operands of such convolutions ends the process; in plain JAX it does."""
    done = run_python(_ABORTING, JAX_DISABLE_MOST_OPTIMIZATIONS="0")
    assert done.stdout.split("\n")[-2] == "weight gradient"


_PLAIN = """
import jax, jax.numpy as jnp, numpy as np, jaxgrad

chwn, nhwc = ("CHWN", "IHWO", "CHWN"), ("NHWC", "HWIO", "NHWC")
calls = {
    "abort": ((3, 6, 7, 2), (3, 2, 3, 4), (2, 1), ((1, 1), (0, 0)), (1, 3), chwn),
    "windows over padding only": ((1, 2, 5, 128), (1, 4, 128, 256), (1, 1), ((1, -2), (0, 0)), None, nhwc),
    "padding": ((2, 8, 9, 1), (3, 3, 1, 2), (1, 1), ((0, 0), (-2, 1)), None, nhwc),
}
rng = np.random.default_rng(0)
for name, (x, w, strides, padding, dilation, layout) in calls.items():
    x, w = (jnp.asarray(rng.integers(-4, 5, shape), jnp.float32) for shape in (x, w))
    found = []
    for conv in (jaxgrad.conv_general_dilated, jax.lax.conv_general_dilated):
        def loss(x, w):
            return (conv(x, w, strides, padding, rhs_dilation=dilation, dimension_numbers=layout) ** 2).sum()
        found.append(jaxgrad.accelerate(jax.jit(jax.value_and_grad(loss, (0, 1))))(x, w))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, err_msg=name), *found)
    if name == "abort":
        print(jaxgrad.report(jaxgrad.accelerate(jax.grad(loss)), x, w))
"""


def test_an_accelerated_convolution_of_jax_lax(run_python):
    done = run_python(_PLAIN, JAX_DISABLE_MOST_OPTIMIZATIONS="0")
    assert "XLA miscompiles the convolution as it is written" in done.stdout


_SYMBOLIC = """
import jax, jax.numpy as jnp, numpy as np, jaxgrad
from jax import export

def gradients(x, w):
    def loss(x, w):
        layout = ("CHWN", "IHWO", "CHWN")
        y = jaxgrad.conv_general_dilated(x, w, (2, 1), ((1, 1), (0, 0)), rhs_dilation=(1, 3), dimension_numbers=layout)
        return (y ** 2).sum()
    return jax.grad(loss, (0, 1))(x, w)

x, w = jnp.arange(252.0).reshape(3, 6, 7, 2) % 7, jnp.arange(72.0).reshape(3, 2, 3, 4) % 5
symbolic = jax.ShapeDtypeStruct(export.symbolic_shape("3, 2*b, 7, 2"), x.dtype)
exported = export.export(jax.jit(gradients), disabled_checks=jaxgrad.export_disabled_checks())(symbolic, w)
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), exported.call(x, w), gradients(x, w))
"""


def test_a_symbolic_size(run_python):
    run_python(_SYMBOLIC, JAX_DISABLE_MOST_OPTIMIZATIONS="0")
