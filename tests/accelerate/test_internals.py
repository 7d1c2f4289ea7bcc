"""What acceleration adds to the lowering of programs: marks, JAX's check for devices, and exemptions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax._src import dispatch
from jax.experimental import compute_on as compute_on_module

import jaxgrad

pytestmark = pytest.mark.jax_version

X, W = jax.ShapeDtypeStruct((4, 8, 16, 16), "float32"), jax.ShapeDtypeStruct((8, 8, 3, 3), "float32")
KERNEL = "jaxgrad_onednn_conv"


def convolve(x, w):
    return lax.conv(x, w, (1, 1), "SAME")


def lowered(function, *args):
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cpu",)).as_text()


def test_programs_that_share_jaxprs_are_searched_once():
    """Depth 40 has 2**40 paths."""
    jaxgrad.report(convolve, X, W)  # installs the lowering rule

    def doubled(function):
        return jax.jit(lambda x: function(function(x)))

    plain, accelerated = (
        jax.jit(jnp.sin),
        jax.jit(jaxgrad.accelerate(lambda x: convolve(x, jnp.ones(W.shape, W.dtype)))),
    )
    for _ in range(40):
        plain, accelerated = doubled(plain), doubled(accelerated)
    found = [
        dispatch.jaxpr_has_prim_requiring_devices(function.trace(X).jaxpr.jaxpr) for function in (plain, accelerated)
    ]
    assert found == [False, True]
    (convolution,) = jaxgrad.report(accelerated, X).convolutions
    assert convolution.count == 2**40


def test_convolutions_on_the_host_of_a_device_stay_on_xla():
    compute_on = getattr(compute_on_module, "compute_on2", compute_on_module.compute_on)  # jax 0.10 has both
    on_host = compute_on(convolve, compute_type="device_host", out_memory_spaces=jax.memory.Space.Device)
    assert KERNEL in lowered(jaxgrad.accelerate(convolve, implementation="onednn"), X, W)
    assert KERNEL not in lowered(jaxgrad.accelerate(on_host, implementation="onednn"), X, W)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_ops_of_jaxgrad_keep_their_implementation_in_custom_rules(where):
    def on_xla(x, w):
        return jaxgrad.conv_general_dilated(x, w, (1, 1), "SAME", implementation="xla")

    @jax.custom_vjp
    def function(x, w):
        return x

    def forward(x, w):
        return on_xla(x, w) if where == "forward" else x, (x, w)

    def backward(residuals, g):
        return on_xla(g, residuals[1]) if where == "backward" else g, jnp.zeros_like(residuals[1])

    function.defvjp(forward, backward)
    accelerated = jaxgrad.accelerate(lambda x, w: function(x, w).sum(), implementation="onednn")
    text = lowered(jax.value_and_grad(accelerated), X, W)  # whose value is that of the forward rule
    assert text.count("stablehlo.convolution") == 1
    assert KERNEL not in text


def test_64_bit_types_that_were_disabled_after_tracing():
    with jax.enable_x64(True):
        shapes = jax.ShapeDtypeStruct((4, 8, 4, 4), "float64"), jax.ShapeDtypeStruct((16, 8, 4, 4), "float64")
        traced = jax.jit(jaxgrad.accelerate(lambda x, w: lax.conv(x, w, (1, 1), "VALID"))).trace(*shapes)
    with jax.enable_x64(False):
        assert "stablehlo.convolution" in traced.lower().as_text()
