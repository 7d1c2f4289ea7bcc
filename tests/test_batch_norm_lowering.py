"""What batch normalisation is lowered to for a GPU, from any machine, and what is told of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from targets import CUDNN, Target

import jaxgrad
from jaxgrad import _ffi

pytestmark = pytest.mark.skipif(
    not _ffi.cuda_targets(), reason="this build has no CUDA module: JAXGRAD_CUDA=1 makes one that has"
)

DEFAULT = Target(None, "gpu")


def _arrays(shape, axis=-1, dtype="bfloat16"):
    channels = jax.ShapeDtypeStruct((shape[axis],), "float64" if dtype == "float64" else "float32")
    return jax.ShapeDtypeStruct(shape, dtype), channels, channels


def _calls(function, *arrays, platform="cuda"):
    """How many calls of each of cuDNN's passes the program holds, and of jaxgrad's kernels in all."""
    text = jax.jit(function).trace(*arrays).lower(lowering_platforms=(platform,)).as_text()
    passes = tuple(text.count(f"@jaxgrad_batch_norm_cudnn_{kind}(") for kind in ("forward", "backward"))
    return *passes, text.count("custom_call @jaxgrad")


def _gradient(target, argnums=(0, 1, 2), residual=None, reads=("y",), **settings):
    def loss(*arrays):
        results = jaxgrad.batch_norm_training(
            *arrays[:3], residual=arrays[0] if residual else None, **settings, implementation=target.implementation
        )
        named = dict(zip(("y", "mean", "var"), results, strict=True))
        return sum(jnp.sum(named[name].astype(jnp.float32) ** 2) for name in reads)

    return jax.grad(loss, argnums)


@pytest.mark.parametrize(("activation", "residual"), [(None, False), ("relu", False), ("relu", True), (None, True)])
@pytest.mark.parametrize(("shape", "axis"), [((4, 6, 6, 16), -1), ((4, 16, 6, 6), 1), ((40, 16), -1)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_forced_both_passes_are_cudnn(shape, axis, dtype, activation, residual):
    call = _gradient(CUDNN, residual=residual, activation=activation, feature_axis=axis)
    with jax.enable_x64(True):
        assert _calls(call, *_arrays(shape, axis, dtype)) == (1, 1, 2)


def test_on_the_cpu_nothing_of_it_is_in_the_program():
    assert _calls(_gradient(DEFAULT), *_arrays((8, 7, 7, 32)), platform="cpu")[:2] == (0, 0)


def test_gradients_through_the_statistics():
    """cuDNN's backward pass knows none: XLA adds them to what it gives, or does without it."""
    arrays = _arrays((4, 6, 6, 16))
    assert _calls(_gradient(CUDNN, reads=("y", "mean", "var")), *arrays) == (1, 1, 2)
    assert _calls(_gradient(CUDNN, reads=("mean", "var")), *arrays) == (1, 0, 1)


def test_a_mapped_call_is_one_call():
    x, scale, bias = _arrays((7, 4, 6, 16))
    assert _calls(jax.vmap(_gradient(CUDNN), in_axes=(0, None, None)), x, scale, bias) == (1, 1, 2)


def test_inference_has_no_such_kernels():
    x, scale, bias = _arrays((4, 6, 6, 16))
    with pytest.raises(ValueError, match=r"batch_norm_inference: implementation='cudnn' cannot run: there are no such"):
        jaxgrad.explain(jaxgrad.batch_norm_inference, x, scale, bias, scale, bias, implementation="cudnn")
    choice = jaxgrad.explain(jaxgrad.batch_norm_inference, x, scale, bias, scale, bias, platform="gpu")
    assert choice.implementation == "xla"


def test_more_elements_than_cudnn_takes():
    arrays = _arrays((1 << 15, 1 << 15, 2))
    choice = jaxgrad.explain(jaxgrad.batch_norm_training, *arrays, platform="gpu")
    assert (choice.implementation, "fewer than 2^31 elements" in choice.reason) == ("xla", True)
    with pytest.raises(ValueError, match=r"cannot run: cuDNN takes fewer than 2\^31 elements, x has 2147483648"):
        jaxgrad.explain(jaxgrad.batch_norm_training, *arrays, platform="gpu", implementation="cudnn")
    # Folded by vmap, a call may outgrow it too.
    x, scale, bias = _arrays((1 << 14, 1 << 14, 2))
    mapped = jax.vmap(_gradient(DEFAULT), in_axes=(0, None, None))
    stacked = jax.ShapeDtypeStruct((4, *x.shape), x.dtype)
    assert _calls(mapped, stacked, scale, bias) == (0, 0, 0)
