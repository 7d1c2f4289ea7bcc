"""A forced implementation on another platform raises the same error in every kind of program."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_module import NEEDS_CUDA_MODULE
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from mesh_running import mesh, run_checks
from op_cases import OPS, op_case, values_and_gradients

import jaxgrad

pytestmark = pytest.mark.jax_version

ON_CUDNN = [
    pytest.param(name, "cudnn", marks=NEEDS_CUDA_MODULE)
    for name in ("conv_general_dilated", "conv_transpose", "batch_norm_training")
]
FORCED = [*((name, "cpu") for name in OPS), *ON_CUDNN]


def _calls(name, implementation):
    case = op_case(name)
    call = case.call(implementation)
    return case.arrays, {"value": call, "gradients": lambda *arrays: values_and_gradients(call, *arrays)[1]}


def _message(name, implementation, wrong):
    own = {"cpu": "cpu", "cudnn": "gpu", "cuda": "gpu"}[implementation]
    named = "(cpu|onednn)" if implementation == "cpu" else implementation
    return rf"^jaxgrad.{name}: implementation='{named}' runs on the platform '{own}' only, got '{wrong}'"


@pytest.mark.parametrize(("name", "implementation"), FORCED)
@pytest.mark.parametrize("what", ["value", "gradients"])
def test_lowered_for_another_platform(name, implementation, what):
    own, wrong, named = ("cpu", "cuda", "gpu") if implementation == "cpu" else ("cuda", "cpu", "cpu")
    arrays, calls = _calls(name, implementation)
    traced = jax.jit(calls[what]).trace(*arrays)
    assert "jaxgrad_" in traced.lower(lowering_platforms=(own,)).as_text()
    with pytest.raises(ValueError, match=_message(name, implementation, named)):
        traced.lower(lowering_platforms=(wrong,))
    with pytest.raises(ValueError, match=_message(name, implementation, "tpu")):
        traced.lower(lowering_platforms=("tpu",))
    exported = {"platforms": ("cpu", "cuda"), "disabled_checks": jaxgrad.export_disabled_checks()}
    with pytest.raises(ValueError, match=_message(name, implementation, named)):
        jax.export.export(jax.jit(calls[what]), **exported)(*arrays)


@pytest.mark.parametrize(("name", "implementation"), ON_CUDNN)
@pytest.mark.parametrize("what", ["value", "gradients"])
def test_run_on_the_cpu(name, implementation, what):
    arrays, calls = _calls(name, implementation)
    arrays = jax.device_put(arrays, jax.devices("cpu")[0])
    stacked = jax.tree.map(lambda a: np.stack([a, a]), arrays)
    with jax.default_device("cpu"):
        for run in (calls[what], jax.jit(calls[what])):
            with pytest.raises(ValueError, match=_message(name, implementation, "cpu")):
                run(*arrays)
        with pytest.raises(ValueError, match=_message(name, implementation, "cpu")):
            jax.vmap(calls[what])(*stacked)
        with jaxgrad.forward_mode(), pytest.raises(ValueError, match=_message(name, implementation, "cpu")):
            calls[what](*arrays)
        with jax.disable_jit(), pytest.raises(ValueError, match=_message(name, implementation, "cpu")):
            calls["value"](*arrays)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("what", ["value", "gradients"])
def test_numpy_arrays_without_jit(name, what):
    arrays, calls = _calls(name, "cpu")
    arrays = jax.tree.map(np.asarray, arrays)
    with jax.default_device(jax.devices("cpu")[0]):
        expected = calls[what](*arrays)
        with jax.disable_jit():
            found = calls[what](*arrays)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected)


@NEEDS_CUDA_MODULE
def test_empty_arrays_keep_the_forced_platform():
    x, c = np.ones((0, 5), np.float32), np.ones(5, np.float32)
    traced = jax.jit(lambda x: jaxgrad.batch_norm_training(x, c, c, implementation="cudnn")).trace(x)
    traced.lower(lowering_platforms=("cuda",))
    with pytest.raises(ValueError, match=_message("batch_norm_training", "cudnn", "cpu")):
        traced.lower(lowering_platforms=("cpu",))


@NEEDS_CUDA_MODULE
def test_platform_dependent_branches():
    case = op_case("conv_general_dilated")

    def call(*arrays):
        return jax.lax.platform_dependent(*arrays, cpu=case.call("cpu"), cuda=case.call("cudnn"))

    traced = jax.jit(call).trace(*case.arrays)
    assert ["allow_tf32" in traced.lower(lowering_platforms=(p,)).as_text() for p in ("cpu", "cuda")] == [False, True]


def check_a_mesh():
    conv = partial(
        jaxgrad.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    x, w = jnp.ones((8, 5, 4, 3)), jnp.ones((3, 3, 3, 2))
    message = _message("conv_general_dilated", "cudnn", "cpu")
    for explicit in (False, True):
        over = mesh(explicit=explicit)
        with jax.set_mesh(over):
            arrays = jax.device_put(x, NamedSharding(over, P("d"))), jax.device_put(w, NamedSharding(over, P()))
            for run in (conv, jax.jit(conv, static_argnames="implementation")):
                with pytest.raises(ValueError, match=message):
                    run(*arrays, implementation="cudnn")


def check_shard_map_and_statistics_alone():
    x, c = jnp.ones((8, 5)), jnp.ones(5)

    def mean(x):
        return jaxgrad.batch_norm_training(x, c, c, axis_name="d", implementation="cudnn")[1]

    sharded = jax.jit(jax.shard_map(mean, mesh=mesh(), in_specs=P("d"), out_specs=P()))
    with pytest.raises(ValueError, match=_message("batch_norm_training", "cudnn", "cpu")):
        sharded(x)


@NEEDS_CUDA_MODULE
@pytest.mark.parametrize("check", [check_a_mesh, check_shard_map_and_statistics_alone])
def test_over_devices(run_python, check):
    run_checks(run_python, "cpu", __file__, [check.__name__])
