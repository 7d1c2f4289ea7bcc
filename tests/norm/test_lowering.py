"""Selection and lowering of batch normalization for a GPU, tested without a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from backends import CUDNN, Backend
from cuda_module import NEEDS_CUDA_MODULE
from preferring import preferring

import jaxgrad

pytestmark = NEEDS_CUDA_MODULE

DEFAULT = Backend(None, "gpu")


@pytest.fixture
def cudnn_for_few_rows():
    """The table of unknown GPUs prefers XLA for these calls, too."""
    jax.clear_caches()
    with preferring("batch_norm", "some thousand rows", "cudnn"):
        yield
    jax.clear_caches()


def _arrays(shape, axis=-1, dtype="bfloat16"):
    channels = jax.ShapeDtypeStruct((shape[axis],), "float64" if dtype == "float64" else "float32")
    return jax.ShapeDtypeStruct(shape, dtype), channels, channels


def _calls(function, *arrays, platform="cuda"):
    """Number of calls of each cuDNN pass in the program, and of all jaxgrad kernels."""
    text = jax.jit(function).trace(*arrays).lower(lowering_platforms=(platform,)).as_text()
    passes = tuple(text.count(f"@jaxgrad_cudnn_batch_norm_{kind}(") for kind in ("forward", "backward"))
    return *passes, text.count("custom_call @jaxgrad")


def _gradient(backend, argnums=(0, 1, 2), residual=None, reads=("y",), **settings):
    def loss(*arrays):
        results = jaxgrad.batch_norm_training(
            *arrays[:3], residual=arrays[0] if residual else None, **settings, implementation=backend.implementation
        )
        named = dict(zip(("y", "mean", "var"), results, strict=True))
        return sum(jnp.sum(named[name].astype(jnp.float32) ** 2) for name in reads)

    return jax.grad(loss, argnums)


RULES = {  # shape of x, channel axis, dtype, selected implementation
    "few rows": ((8, 14, 14, 256), -1, "bfloat16", "cudnn"),
    "few rows of float16": ((32, 8, 8, 32), -1, "float16", "cudnn"),
    "the fewest": ((1024, 32), -1, "bfloat16", "cudnn"),
    "fewer": ((1023, 32), -1, "bfloat16", "xla"),
    "the most": ((4, 32, 32, 32), -1, "bfloat16", "cudnn"),
    "more": ((4097, 32), -1, "bfloat16", "xla"),
    "fewer channels": ((32, 8, 8, 31), -1, "bfloat16", "xla"),
    "large": ((128, 56, 56, 64), -1, "bfloat16", "xla"),
    "float32": ((8, 14, 14, 256), -1, "float32", "xla"),
    "float64": ((8, 14, 14, 256), -1, "float64", "xla"),
    "channels first": ((8, 256, 14, 14), 1, "bfloat16", "xla"),
    "channels last but for an axis of 1": ((8, 196, 256, 1), 2, "bfloat16", "cudnn"),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.usefixtures("cudnn_for_few_rows")
def test_default_selection(name):
    """The program calls cuDNN exactly when `explain` reports it."""
    shape, axis, dtype, expected = RULES[name]
    with jax.enable_x64(True):
        arrays = _arrays(shape, axis, dtype)
        choice = jaxgrad.explain(jaxgrad.batch_norm_training, *arrays, feature_axis=axis, platform="gpu")
        assert (choice.implementation, choice.passes) == (expected, ())
        calls = _calls(_gradient(DEFAULT, feature_axis=axis), *arrays)
    assert calls == ((1, 1, 2) if expected == "cudnn" else (0, 0, 0))
    if expected == "xla":
        assert "cuDNN" in choice.reason or "XLA" in choice.reason


@pytest.mark.usefixtures("cudnn_for_few_rows")
def test_a_loss_of_dscale_alone_runs_on_xla():
    """cuDNN computes all gradients at once; XLA skips the work that only dx needs."""
    arrays = _arrays((8, 14, 14, 256))
    assert _calls(_gradient(DEFAULT, argnums=(1, 2)), *arrays) == (1, 0, 1)
    assert _calls(_gradient(CUDNN, argnums=(1, 2)), *arrays) == (1, 1, 2)


@pytest.mark.parametrize(("activation", "residual"), [(None, False), ("relu", False), ("relu", True), (None, True)])
@pytest.mark.parametrize(("shape", "axis"), [((4, 6, 6, 16), -1), ((4, 16, 6, 6), 1), ((40, 16), -1)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_forced_cudnn_runs_both_passes(shape, axis, dtype, activation, residual):
    call = _gradient(CUDNN, residual=residual, activation=activation, feature_axis=axis)
    with jax.enable_x64(True):
        assert _calls(call, *_arrays(shape, axis, dtype)) == (1, 1, 2)


def test_cpu_program_has_no_cudnn_call():
    assert _calls(_gradient(DEFAULT), *_arrays((8, 7, 7, 32)), platform="cpu")[:2] == (0, 0)


def test_gradients_through_the_statistics():
    """The backward pass of cuDNN has no cotangents of the statistics; XLA adds their part."""
    arrays = _arrays((4, 6, 6, 16))
    assert _calls(_gradient(CUDNN, reads=("y", "mean", "var")), *arrays) == (1, 1, 2)
    assert _calls(_gradient(CUDNN, reads=("mean", "var")), *arrays) == (1, 0, 1)


def test_vmap_lowers_to_one_call():
    x, scale, bias = _arrays((7, 4, 6, 16))
    assert _calls(jax.vmap(_gradient(CUDNN), in_axes=(0, None, None)), x, scale, bias) == (1, 1, 2)


def test_inference_has_no_cudnn_kernel():
    x, scale, bias = _arrays((4, 6, 6, 16))
    with pytest.raises(
        ValueError, match=r"batch_norm_inference: implementation='cudnn' cannot run: the implementations of this op are"
    ):
        jaxgrad.explain(jaxgrad.batch_norm_inference, x, scale, bias, scale, bias, implementation="cudnn")
    choice = jaxgrad.explain(jaxgrad.batch_norm_inference, x, scale, bias, scale, bias, platform="gpu")
    assert choice.implementation == "xla"


def test_too_many_elements_for_cudnn_run_on_xla():
    arrays = _arrays((1 << 15, 1 << 15, 2))
    choice = jaxgrad.explain(jaxgrad.batch_norm_training, *arrays, platform="gpu")
    assert (choice.implementation, "fewer than 2^31 elements" in choice.reason) == ("xla", True)
    with pytest.raises(ValueError, match=r"cannot run: cuDNN supports fewer than 2\^31 elements, x has 2147483648"):
        jaxgrad.explain(jaxgrad.batch_norm_training, *arrays, platform="gpu", implementation="cudnn")


@pytest.mark.usefixtures("cudnn_for_few_rows")
def test_too_many_elements_for_cudnn_run_on_xla_under_vmap():
    x, scale, bias = _arrays((4096, 1024))
    mapped = jax.vmap(_gradient(DEFAULT), in_axes=(0, None, None))
    for num_problems, expected in ((511, (1, 1, 2)), (512, (0, 0, 0))):
        stacked = jax.ShapeDtypeStruct((num_problems, *x.shape), x.dtype)
        assert _calls(mapped, stacked, scale, bias) == expected


def test_both_sums_of_a_pass_are_one_reduction_on_a_gpu():
    """The sums of mean and variance, and the sums of dscale and dbias."""
    arrays = _arrays((64, 40, 40, 8), dtype="float32")
    text = jax.jit(_gradient(DEFAULT)).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    large = [line for line in text.splitlines() if "stablehlo.reduce(" in line and "64x40x40x8" in line]
    assert [line.count("init:") for line in large if "init:" in line] == [2, 2], large
