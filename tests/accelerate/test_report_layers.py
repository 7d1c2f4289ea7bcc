"""`jaxgrad.report`: batch normalizations and GRUs, layers, and the share of the arithmetic that jaxgrad moved."""

from __future__ import annotations

import functools
import os

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from accelerated import convolve, convolve_arrays
from jax import lax

import jaxgrad
from jaxgrad._src.accelerate.expectation import expectation

pytestmark = pytest.mark.jax_version

X, W = convolve_arrays()
STEPS, ROWS, INPUTS, HIDDEN = 5, 3, 4, 6


def _like(*shapes):
    return [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]


SEQUENCE = _like((STEPS, ROWS, INPUTS), (1, 3 * HIDDEN, INPUTS), (1, 3 * HIDDEN, HIDDEN))


def _report(function, *arrays, platform="cpu"):
    return jaxgrad.report(function, *arrays, platform=platform)


def _gru(x, w, r, **options):
    return jnp.sum(jaxgrad.gru(x, w, r, linear_before_reset=True, **options)[0] ** 2)


def _normalize(x, scale, **options):
    return jnp.sum(jaxgrad.batch_norm_training(x, scale, scale, **options)[0] ** 2)


def _rows(found):
    return [(call.op, call.pass_name, call.implementation, call.moved) for call in found.calls]


def test_a_model_of_ops():
    """The gradients belong to the line of the forward pass."""

    def model(x, scale, w, r):
        y = jaxgrad.batch_norm_training(x, scale, scale)[0]  # normalize
        return _gru(y, w, r)

    found = _report(jax.grad(model, (0, 1, 2, 3)), *_like((STEPS, ROWS, INPUTS), (INPUTS,)), *SEQUENCE[1:])
    assert [(row[:3]) for row in _rows(found)] == [
        ("batch_norm", "forward", "cpu"),
        ("gru", "forward", "cpu"),
        ("gru", "backward", "cpu"),
        ("batch_norm", "backward", "cpu"),
    ]
    assert found.convolutions == ()
    normalization, gru = found.layers
    with open(__file__) as file:
        number = next(i for i, line in enumerate(file, 1) if line.endswith("# normalize\n"))
    assert normalization.source == f"{os.path.relpath(__file__)}:{number} (model)"
    assert [call.pass_name for call in gru.calls] == ["forward", "backward"]
    assert gru.calls[0].shapes.startswith("gru f32 T=5 B=3 I=4 H=6 D=1 linear_before_reset")
    assert normalization.calls[0].shapes == "batch_norm_training x=f32[15,4,1]"
    assert {call.flops for call in normalization.calls} == {0}
    assert found.counts == {"cpu": 4}


def _written_out(x, w, r):
    """The GRU as a scan, of matrix products of JAX."""

    def step(h, x):
        xs, hs = (jnp.split(product, 3, axis=-1) for product in (x @ w[0].T, h @ r[0].T))
        z, r_ = (jax.nn.sigmoid(a + b) for a, b in zip(xs[:2], hs[:2], strict=True))
        h = (1 - z) * jnp.tanh(xs[2] + r_ * hs[2]) + z * h
        return h, h

    return jnp.sum(lax.scan(step, jnp.zeros((x.shape[1], HIDDEN), x.dtype), x)[1] ** 2)


@pytest.mark.parametrize("argnums", [None, (0,), (1,), (2,), (0, 1, 2)])
def test_operations_of_a_gru(argnums):
    """Those of the matrix products of the scan, whose body counts as often as it runs."""
    both = [f if argnums is None else jax.grad(f, argnums) for f in (_gru, _written_out)]
    op, scan = (_report(f, *SEQUENCE) for f in both)
    # JAX leaves out the gradient of the first state, and of inputs that need none.
    assert op.product_flops == scan.flops == 0
    assert op.flops == scan.product_flops > 0
    assert op.share == 1
    assert scan.share == 0


@pytest.mark.parametrize("in_axes", [(2, None, None), (0, 0, 0), (0, None, None)])
def test_vmap_of_a_gru(in_axes):
    """The call has the sizes of the kernel's call, whichever axis is mapped."""
    arrays = [
        array if axis is None else jax.ShapeDtypeStruct((*array.shape[:axis], 7, *array.shape[axis:]), array.dtype)
        for array, axis in zip(SEQUENCE, in_axes, strict=True)
    ]
    gradient = jax.grad(_gru, (0, 1, 2))
    one, mapped = _report(gradient, *SEQUENCE), _report(jax.vmap(gradient, in_axes), *arrays)
    assert mapped.flops == 7 * one.flops
    assert [row[1:3] for row in _rows(mapped)] == [("forward", "cpu"), ("backward", "cpu")]


def test_vmap_of_a_convolution_over_an_inner_axis():
    x, w = _like((4, 3, 8), (3, 1, 3))
    op = functools.partial(jaxgrad.conv_general_dilated, window_strides=(1,), padding="SAME", feature_group_count=3)
    (mapped,) = _report(jax.vmap(op, (1, None), 1), *_like((4, 5, 3, 8)), w).convolutions
    assert mapped.lhs == "f32[20,3,8] NCW"
    assert mapped.flops == 5 * _report(op, x, w).flops


def test_why_an_op_runs_where_it_does():
    x, scale = _like((8, 6, 5, 16), (16,))

    def reasons(function, *arrays, platform="cpu"):
        return {(c.implementation, c.moved, c.reason) for c in _report(function, *arrays, platform=platform).calls}

    forced = functools.partial(_normalize, implementation="cpu")
    assert reasons(forced, x, scale) == {("cpu", "forced", "forced by implementation='cpu'")}
    assert reasons(forced, x, scale, platform="gpu") == {
        ("xla", "", "implementation='cpu' of the op raises ValueError on this platform")
    }
    assert reasons(functools.partial(_normalize, implementation="xla"), x, scale) == {
        ("xla", "", "selected by the op of jaxgrad")
    }
    ((implementation, moved, reason),) = reasons(jax.grad(_normalize), x, scale, platform="gpu")
    assert (implementation, moved) == ("xla", "")
    explained = jaxgrad.explain(jaxgrad.batch_norm_training, x, scale, scale, platform="gpu")
    assert reason == (explained.passes or (explained,))[0].reason
    one_step = _like((1, ROWS, INPUTS))[0], *SEQUENCE[1:]
    assert reasons(_gru, *one_step) == {("xla", "", jaxgrad.explain(jaxgrad.gru, *one_step, platform="cpu").reason)}


def test_frozen_statistics_are_a_call():
    def frozen(x, scale):
        return jnp.sum(jaxgrad.batch_norm_inference(x, scale, scale, scale, scale) ** 2)

    found = _report(jax.grad(frozen), *_like((8, 6, 16), (16,)))
    assert [row[:3] for row in _rows(found)] == [("batch_norm", "forward", "cpu"), ("batch_norm", "backward", "cpu")]
    assert found.calls[0].shapes == "batch_norm_inference x=f32[48,16,1]"


def test_scans_count_as_often_as_they_run():
    @jaxgrad.accelerate
    def loop(x, w):
        def inner(y, _):
            return convolve(y, w[:3]), None

        def outer(y, _):
            return lax.scan(inner, y, None, length=5)[0], None

        return lax.scan(outer, convolve(x, w[:3]), None, length=2)[0]

    once, inside = _report(loop, X, W).calls
    assert (once.repeats, inside.repeats, inside.count) == (1, 10, 1)
    assert inside.total_flops == 10 * once.flops
    assert _report(loop, X, W).flops == 11 * once.flops


class _Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(8, (3, 3))(x))
        return x + nn.Conv(8, (1, 3))(x)


class _Deep(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(6):
            x = _Block()(x)
        return nn.Dense(3)(x)


def test_the_report_of_a_large_model_is_short():
    """Modules that differ in their numbers are a layer."""
    model, x = _Deep(), _like((2, 9, 7, 8))[0]
    params = jax.eval_shape(model.init, jax.random.key(0), x)

    @jaxgrad.accelerate
    def loss(params, x):
        return jnp.sum(model.apply(params, x) ** 2)

    found = _report(jax.grad(loss), params, x)
    assert sum(found.counts.values()) == 35
    assert [layer.scope for layer in found.layers] == ["_Deep/_Block_*/Conv_0", "_Deep/_Block_*/Conv_1"]
    text = str(found)
    assert len(text.splitlines()) < 8
    assert "6 forward, 6 weight_gradient, 6 input_gradient" in text
    assert "35 calls in 2 layers on cpu" in text
    one = _report(_Block().apply, {"params": params["params"]["_Block_3"]}, x)
    assert [layer.scope for layer in one.layers] == ["_Block/Conv_0", "_Block/Conv_1"]


def test_the_share_of_the_arithmetic():
    """Matrix products are part of the whole."""

    @jaxgrad.accelerate
    def model(x, w, dense):
        return jnp.tanh(convolve(x, w)).reshape(2, -1) @ dense

    found = _report(model, X, W, *_like((4 * 9 * 7, 11)))
    (conv,) = found.calls
    assert found.product_flops == 2 * 2 * 4 * 9 * 7 * 11
    assert found.share == pytest.approx(conv.flops / (conv.flops + found.product_flops))
    assert f"{100 * found.share:.3g} % of the arithmetic" in found.summary
    assert "a gain is to be expected" in found.summary
    large = _report(model, X, W, *_like((4 * 9 * 7, 100_000))).summary
    assert large.endswith("no gain is to be expected: the share is too small")


def _expected(function, *arrays, platform="cpu"):
    found = _report(function, *arrays, platform=platform)
    return expectation(found.calls, found.share).split(":")[0]


def test_whether_a_gain_is_to_be_expected():
    """One program for each answer."""
    large = jnp.ones((2000, 2000), jnp.float32)

    @jaxgrad.accelerate
    def depthwise(x, w):
        y = lax.conv_general_dilated(x, w, (1, 1), "SAME", feature_group_count=32)
        return y, large @ large

    def partly_forced(x, w, small):
        conv = functools.partial(jaxgrad.conv_general_dilated, window_strides=(1, 1), padding="SAME")
        return conv(x, w, implementation="onednn"), conv(small, w)

    def symbolic(x, w, dense):
        return jaxgrad.accelerate(convolve)(x, w), dense @ dense.T

    nothing, gain = "no gain is to be expected", "a gain is to be expected"
    groups = _like((8, 32, 14, 14), (32, 1, 3, 3))
    assert _expected(lambda x: 2 * x, X) == nothing
    assert _expected(convolve, X, W) == nothing
    assert _expected(jaxgrad.accelerate(convolve), X, W) == gain
    assert _expected(jaxgrad.accelerate(convolve, implementation="onednn"), X, W) == "a gain is uncertain"
    assert _expected(partly_forced, *_like((64, 3, 48, 48), (8, 3, 3, 3), (1, 3, 4, 4))) == "a gain is uncertain"
    unknown = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 3"), "float32")
    assert _expected(symbolic, X, W, unknown) == "a gain is possible"
    forced = functools.partial(
        jaxgrad.conv_general_dilated, window_strides=(1, 1), padding="SAME", implementation="onednn"
    )
    found = _report(forced, X, W, platform="gpu")
    assert found.summary.endswith("the program raises ValueError on this platform")
    assert _expected(depthwise, *groups) == "a gain is possible"
    assert _expected(lambda *arrays: (_gru(*arrays), large @ large), *SEQUENCE) == "a gain is possible"
    assert _expected(_gru, *SEQUENCE) == gain
    normalize = jax.grad(_normalize), *_like((8, 6, 5, 16), (16,))
    assert _expected(*normalize) == "a small gain is possible"
    assert _expected(*normalize, platform="gpu") == nothing


def test_another_form_on_xla_is_moved():
    """A window that covers the input is a matrix product."""

    @jaxgrad.accelerate
    def product(x, w):
        return lax.conv(x, w, (1, 1), "VALID")

    found = _report(product, X, *_like((4, 3, 9, 7)))
    assert _rows(found) == [("conv", "forward", "xla", "selected")]
    assert " runs on jaxgrad's kernels or in a faster form on XLA; a gain is to be expected" in found.summary


def test_scopes_with_an_asterisk():
    def model(x, w):
        for name in ("a*b", "a*b1", "a*b2"):
            with jax.named_scope(name):
                x = lax.conv(x, w, (1, 1), "SAME")
        return x

    found = _report(jaxgrad.accelerate(model), *_like((2, 3, 5, 6), (3, 3, 3, 3)))
    assert {layer.scope for layer in found.layers} == {"a*b", "a*b*"}
