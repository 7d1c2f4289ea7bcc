"""JAX's transformations of an accelerated function: values against the same function in float64, and the kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformations
from accelerated import PASSES, assert_passes, close, convolve, convolve_arrays, network, network_arrays, passes
from backends import CUDNN, ONEDNN, float64_on_cpu
from jax import checkpoint_policies, lax
from jax.ad_checkpoint import checkpoint_name
from op_cases import loss, values_and_gradients
from tolerances import chained_rounding

import jaxgrad
from jaxgrad._src.native import cuda

pytestmark = pytest.mark.jax_version

BACKENDS = (ONEDNN, CUDNN)
NCHW = ("NCHW", "OIHW", "NCHW")
TRANSPOSED = {"forward", "input_gradient"}
WIDE = network_arrays(np.float64)


def _custom_vjp(function, arrays):
    """A user's rule that computes the gradient with the function itself, for half of the cotangent."""

    @jax.custom_vjp
    def halved(*arrays):
        return function(*arrays)

    def forward(*arrays):
        return jax.vjp(function, *arrays)

    halved.defvjp(forward, lambda pullback, cotangent: pullback(cotangent / 2))
    return values_and_gradients(halved, *arrays)


def _custom_jvp(function, arrays):
    """A user's rule with twice the tangent, in forward and in reverse mode."""

    @jax.custom_jvp
    def doubled(*arrays):
        return function(*arrays)

    @doubled.defjvp
    def _(arrays, tangents):
        y, tangent = jax.jvp(function, arrays, tangents)
        return y, 2 * tangent

    return transformations.jvp(doubled, arrays), values_and_gradients(doubled, *arrays)


def _vmap_of_grad(function, arrays):
    """Per-example gradients of shared weights."""
    x, *weights = arrays
    return jax.vmap(lambda x: values_and_gradients(lambda *ws: function(x[None], *ws), *weights))(x)


def _checkpoint(function, arrays):
    return values_and_gradients(jax.checkpoint(function), *arrays)


# name: (function(f, arrays), the passes in its program). A forward-mode derivative has the passes of the function.
TRANSFORMATIONS: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "value_and_grad": (transformations.value_and_grad, PASSES),
    "vjp": (transformations.vjp, PASSES),
    "jacrev": (transformations.jacrev, {"forward", "weight_gradient"}),
    "jacfwd": (transformations.jacfwd, TRANSPOSED),
    "jvp": (transformations.jvp, TRANSPOSED),
    "hessian": (transformations.hessian, PASSES),
    "linearize": (transformations.linearize, TRANSPOSED),
    "linear_transpose": (transformations.linear_transpose, PASSES),
    "gradients_of_gradients": (transformations.gradients_of_a_gradient_penalty, PASSES),
    "checkpoint": (_checkpoint, PASSES),
    "scan": (transformations.scan, PASSES),
    "while_loop": (transformations.while_loop, TRANSPOSED),
    "cond": (transformations.cond, PASSES),
    "custom_vjp": (_custom_vjp, PASSES),
    "custom_jvp": (_custom_jvp, PASSES),
    "vmap_of_grad": (_vmap_of_grad, PASSES),
    "nested_vmap": (transformations.nested_vmap, PASSES),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_matches_float64(backend, name):
    transformation, expected_passes = TRANSFORMATIONS[name]
    arrays = backend.put(network_arrays())
    accelerated = jaxgrad.accelerate(network, implementation=backend.implementation)
    lowered = jax.jit(partial(transformation, accelerated)).lower(arrays)
    assert_passes(lowered, expected_passes)
    with float64_on_cpu():
        expected = jax.jit(partial(transformation, network))(WIDE)
    close(lowered.compile()(arrays), expected, backend=backend, rounding=chained_rounding(backend))


# Functions of jax and jax.numpy that call convolutions, of a (4, 4, 9, 8) and w.
LIBRARY_FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "conv": (lambda x, w: lax.conv(x, w, (2, 1), "SAME"), (6, 4, 3, 2)),
    "conv_with_general_padding": (
        lambda x, w: lax.conv_with_general_padding(x, w, (1, 1), ((1, 2), (0, -1)), (2, 1), (1, 2)),
        (6, 4, 3, 2),
    ),
    "conv_transpose": (lambda x, w: lax.conv_transpose(x, w, (2, 1), "SAME", dimension_numbers=NCHW), (6, 4, 3, 2)),
    "conv_transpose, transpose_kernel": (
        lambda x, w: lax.conv_transpose(x, w, (2, 1), "VALID", dimension_numbers=NCHW, transpose_kernel=True),
        (4, 6, 3, 2),
    ),
    "conv_general_dilated_patches": (
        lambda x, w: lax.conv_general_dilated_patches(x * w, (3, 2), (2, 1), ((1, 0), (0, 1))),
        (4, 4, 9, 8),
    ),
    "batch_group_count": (
        lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", batch_group_count=2),
        (6, 4, 3, 2),
    ),
    "convolve": (lambda x, w: jnp.convolve(x[0, 0, 0], w), (3,)),
}


@pytest.mark.parametrize("name", LIBRARY_FUNCTIONS)
def test_functions_that_call_convolutions(backend, name):
    function, shape = LIBRARY_FUNCTIONS[name]
    rng = np.random.default_rng(0)
    wide = rng.normal(size=(4, 4, 9, 8)) / 2, rng.normal(size=shape) / 2  # the loss multiplies errors of large results
    arrays = backend.put(tuple(array.astype("float32") for array in wide))
    accelerated = jaxgrad.accelerate(function, implementation=backend.implementation)
    lowered = jax.jit(partial(values_and_gradients, accelerated)).lower(*arrays)
    with float64_on_cpu():
        expected = jax.jit(partial(values_and_gradients, function))(*wide)
    assert_passes(lowered, TRANSPOSED if "patches" in name else PASSES)
    close(lowered.compile()(*arrays), expected, terms=2000, backend=backend)


@pytest.mark.parametrize("mapped", [("x",), ("w",), ("x", "w")], ids="-".join)
def test_vmap_over_every_choice_of_operands(backend, mapped):
    """With the gradients, and mapped axes that are not the first ones."""
    x, w = (
        np.moveaxis(np.stack([a, a / 2, -a]), 0, 2) if name in mapped else a
        for name, a in zip("xw", convolve_arrays(), strict=True)
    )
    in_axes = tuple(2 if name in mapped else None for name in "xw")

    def run(function, *arrays):
        return jax.jit(jax.vmap(partial(values_and_gradients, function), in_axes)).lower(*arrays)

    accelerated = jaxgrad.accelerate(convolve, implementation=backend.implementation)
    lowered = run(accelerated, *backend.put((x, w)))
    assert_passes(lowered, PASSES)
    with float64_on_cpu():
        expected = run(convolve, np.float64(x), np.float64(w)).compile()(np.float64(x), np.float64(w))
    close(lowered.compile()(x, w), expected, terms=1000, backend=backend)


def _calls(gradient, arrays):
    """The kernels of a compiled program in which XLA on the CPU does not merge a recomputed call with the first one."""
    compiled = jax.jit(gradient).lower(*arrays).compile(compiler_options={"xla_disable_hlo_passes": "cse"})
    return passes(compiled), compiled(*arrays)


# policy, and whether it saves the result of a convolution
POLICIES = {
    "none": (None, False),
    "nothing_saveable": (checkpoint_policies.nothing_saveable, False),
    "dots_saveable": (checkpoint_policies.dots_saveable, True),
    "everything_saveable": (checkpoint_policies.everything_saveable, True),
    "save_only_these_names": (checkpoint_policies.save_only_these_names("y"), True),
    "save_any_names_but_these": (checkpoint_policies.save_any_names_but_these("y"), False),
}


@pytest.mark.parametrize("name", POLICIES)
def test_checkpoint_policies(name):
    """A policy that saves the results of `jax.lax` saves the results of the kernels."""
    policy, saves = POLICIES[name]

    @jaxgrad.accelerate
    @partial(jax.checkpoint, policy=policy)
    def layer(x, w):
        return jnp.sin(checkpoint_name(convolve(jnp.tanh(x), w), "y"))

    found, results = _calls(partial(values_and_gradients, layer), convolve_arrays())
    assert found == {"forward": 1 if saves else 2, "input_gradient": 1, "weight_gradient": 1}
    close(
        results,
        jax.jit(partial(values_and_gradients, lambda x, w: jnp.sin(convolve(jnp.tanh(x), w))))(
            *convolve_arrays(np.float64)
        ),
    )


def test_donated_arguments(backend):
    """All arguments are donated; XLA may write their gradients in their place."""
    accelerated = jaxgrad.accelerate(network, implementation=backend.implementation)
    gradients = partial(values_and_gradients, accelerated)
    donated = backend.put(tuple(map(np.array, network_arrays())))
    found = jax.jit(gradients, donate_argnums=(0, 1, 2))(*donated)
    assert donated[0].is_deleted()
    close(found, jax.jit(gradients)(*backend.put(network_arrays())))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_eval_shape(dtype):
    shapes = [jax.ShapeDtypeStruct(a.shape, dtype) for a in convolve_arrays()]
    assert jax.eval_shape(jaxgrad.accelerate(convolve), *shapes) == jax.eval_shape(convolve, *shapes)


@pytest.mark.parametrize("implementation", [None, "cudnn", "onednn"])
def test_lowering_for_cuda_without_a_gpu(implementation):
    """The program for a GPU calls no CPU handler; cuDNN's plans are found when it runs."""
    accelerated = jaxgrad.accelerate(network, implementation=implementation)
    traced = jax.jit(partial(values_and_gradients, accelerated)).trace(*network_arrays())
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "@jaxgrad_onednn" not in text
    for_both = traced.lower(lowering_platforms=("cpu", "cuda")).as_text()
    assert ("@jaxgrad_onednn" in for_both) == (implementation != "cudnn")
    on_cuda = {"xla"} if implementation == "onednn" or not cuda.targets() else PASSES
    if implementation is not None:  # by default each pass is selected for itself
        assert set(passes(text)) == on_cuda
        assert set(passes(for_both)) == {"xla", *on_cuda, *(PASSES if implementation == "onednn" else ())}


@pytest.mark.skipif(not cuda.targets(), reason="the package is built without CUDA")
def test_a_forced_implementation_runs_independent_problems_too():
    """On a GPU, where the table prefers XLA for their weight gradients."""
    function = jax.vmap(partial(values_and_gradients, jaxgrad.accelerate(convolve, implementation="cudnn")))
    arrays = [np.stack([array] * 3) for array in convolve_arrays()]
    assert_passes(jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)), PASSES)


@pytest.mark.parametrize(("argnums", "expected"), [(0, TRANSPOSED), (1, {"forward", "weight_gradient"})])
def test_program_holds_only_the_requested_gradients(backend, argnums, expected):
    accelerated = jaxgrad.accelerate(convolve, implementation=backend.implementation)
    gradient = jax.grad(lambda x, w: loss(accelerated(x, w)), argnums)
    assert set(passes(jax.jit(gradient).lower(*backend.put(convolve_arrays())))) == expected


def test_debug_nans(backend):
    """No intermediate NaN, and a NaN of the arguments is found."""
    run = jax.jit(partial(values_and_gradients, jaxgrad.accelerate(network, implementation=backend.implementation)))
    x, *weights = network_arrays()
    with jax.debug_nans(True):
        found = run(*backend.put((x, *weights)))
        with pytest.raises(FloatingPointError):
            run(*backend.put((x * np.nan, *weights)))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))


def test_enable_x64_both_ways():
    """One jitted function of float64 NumPy arrays, called with 64-bit types off, on, and off again."""
    run = jax.jit(partial(values_and_gradients, jaxgrad.accelerate(network, implementation="onednn")))
    with float64_on_cpu():
        expected = jax.jit(partial(values_and_gradients, network))(*WIDE)
    for enabled in (False, True, False):
        with jax.enable_x64(enabled):
            close(run(*WIDE), expected, "float64" if enabled else "float32")
            assert set(passes(run.lower(*WIDE))) == ({"xla"} if enabled else PASSES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_strict_dtype_promotion(backend, dtype):
    arrays = backend.put(network_arrays(dtype))
    accelerated = jaxgrad.accelerate(network, implementation=backend.implementation)
    with jax.numpy_dtype_promotion("strict"):
        lowered = jax.jit(partial(jax.vjp, accelerated)).lower(*arrays)
        gradients = jax.jit(lambda *arrays: jax.vjp(accelerated, *arrays)[1](accelerated(*arrays))).lower(*arrays)
    assert set(passes(lowered)) == TRANSPOSED
    assert set(passes(gradients)) == PASSES


def _runs(function) -> int:
    """The number of kernel calls of a function that was called before."""

    def calls():
        counters = jaxgrad.plan_cache_info()["onednn"]
        return counters["hits"] + counters["misses"]

    jax.block_until_ready(function())
    before = calls()
    jax.block_until_ready(function())
    return calls() - before


@pytest.mark.parametrize("disable_jit", [False, True])
def test_calls_outside_jit(disable_jit):
    """Each operation is a program of its own, whose mark belongs to the key of JAX's cache."""
    arrays = convolve_arrays()
    gradient = jax.grad(lambda x, w: loss(convolve(x, w)), (0, 1))

    def accelerated():
        with jaxgrad.accelerate():
            return gradient(*arrays)

    expected = gradient(*convolve_arrays(np.float64))
    with jax.disable_jit(disable_jit):
        assert _runs(lambda: gradient(*arrays)) == 0
        assert _runs(accelerated) == 3
        assert _runs(lambda: jaxgrad.accelerate(gradient)(*arrays)) == 3
        assert _runs(lambda: gradient(*arrays)) == 0
        close(accelerated(), expected)
