"""`jaxgrad.explain`, `report` and `tune` of pooling."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_module import NEEDS_CUDA_MODULE
from tolerances import input_dtype

import jaxgrad
from jaxgrad._src.native import cuda
from jaxgrad._src.pool import cuda as pool_cuda
from jaxgrad._src.pool.cuda import CudaBackend
from jaxgrad._src.pool.params import PoolProblem, Window

pytestmark = pytest.mark.jax_version

OPS = {"max_pool": jaxgrad.max_pool, "avg_pool": jaxgrad.avg_pool}
every_op = pytest.mark.parametrize("name", OPS)
X = jax.ShapeDtypeStruct((2, 9, 8, 5), "float32")


@every_op
def test_explain(name):
    explained = jaxgrad.explain(OPS[name], X, (3, 2), platform="cpu")
    assert str(explained) == f"{name} on cpu: 'cpu' (jaxgrad's own kernel)"
    assert jaxgrad.explain(OPS[name], X, (2,) * 3, platform="gpu").implementation == "xla"
    assert jaxgrad.explain(OPS[name], X, (3, 2), platform="cpu", implementation="xla").implementation == "xla"
    assert jaxgrad.explain(OPS[name], platform="cpu").implementation == "cpu"


@pytest.mark.parametrize(
    ("dtype", "window", "changes", "expected"),
    [
        ("bfloat16", (3, 3), {}, "cuda cuda, cuda cuda"),
        ("bfloat16", (2, 2), {}, "xla cuda, xla cuda"),
        ("float32", (3, 3), {}, "xla cuda, xla cuda"),
        ("float32", (3, 3), {"strides": (1, 1)}, "cuda cuda, cuda cuda"),
        ("bfloat16", (9, 8), {}, "xla xla, xla xla"),
        ("bfloat16", (9, 4), {"dilation": (1, 2)}, "xla cuda, xla xla"),  # JAX has no gradient of such maxima
        ("bfloat16", (3, 3), {"channels_last": False}, "xla cuda, xla cuda"),
        ("bfloat16", (2, 2), {"channels_last": False}, "xla cuda, xla xla"),
    ],
)
def test_preferences_on_a_gpu(dtype, window, changes, expected):
    """Forward pass and gradient of a maximum, and of a mean."""
    settings = {"strides": (2, 2), "padding": ((0, 0),) * 2, "dilation": (1, 1), "channels_last": True, **changes}
    calls = [PoolProblem(op, (2, 64, 64, 64), input_dtype(dtype), Window(window, **settings)) for op in OPS]
    found = [[CudaBackend().row(name, call).prefer for name in ("forward", "input_gradient")] for call in calls]
    assert ", ".join(map(" ".join, found)) == expected


@NEEDS_CUDA_MODULE
@every_op
def test_explain_on_a_gpu(name, monkeypatch):
    monkeypatch.setattr(cuda, "gpu_ordinal", lambda: 0)
    monkeypatch.setattr(cuda, "nvrtc_unavailable", lambda: "")
    monkeypatch.setattr(pool_cuda, "_load", lambda number, problem: 0)
    explained = jaxgrad.explain(OPS[name], X, (3, 2), platform="gpu")
    assert [found.implementation for found in explained.passes][:2] == ["xla", "cuda"]
    assert explained.reason == "XLA is as fast in forward passes of pooling whose windows share few elements"
    assert jaxgrad.explain(OPS[name], X, (8, 7), platform="gpu").implementation == "xla"


def test_explain_many_spatial_axes():
    x = jax.ShapeDtypeStruct((2, 3, 4, 5, 6, 7), "float32")
    explained = jaxgrad.explain(jaxgrad.max_pool, x, (2,) * 4, platform="cpu")
    assert explained.implementation == "xla"
    assert explained.reason == "the CPU kernels take 1 to 3 spatial axes, window_shape has 4"


@every_op
def test_report(name):
    def loss(x):
        return jnp.sum(jnp.sin(OPS[name](x, (3, 2), (2, 1), "SAME")))

    report = jaxgrad.report(jax.grad(loss), X, platform="cpu")
    found = {(call.op, call.pass_name, call.implementation) for call in report.calls}
    assert found == {(name, "forward", "cpu"), (name, "input_gradient", "cpu")}
    assert "f32[2,9,8,5] window=3x2 strides=2x1" in report.details()


@every_op
def test_tune(name):
    x = np.random.default_rng(0).normal(size=(2, 3, 9, 8)).astype(np.float32)

    def step(x):
        return jax.grad(lambda x: jnp.sum(jnp.sin(OPS[name](x, (3, 2), (2, 1), feature_axis=1))))(x)

    with jax.default_device(jax.devices("cpu")[0]):
        tuning = jaxgrad.tune(step, x)
    ((text, choice),) = next(iter(tuning.machines.values())).items()
    assert text == f"{name} x=f32[6,9,8,1] window=3x2 strides=2x1 dilation=1x1 padding=0,0 0,0 channels_first"
    assert set(choice.times_us) == {"cpu", "xla"}
    with jaxgrad.config.override(tuning=tuning):
        explained = jaxgrad.explain(OPS[name], x, (3, 2), (2, 1), feature_axis=1, platform="cpu")
    assert explained.implementation == choice.implementation
