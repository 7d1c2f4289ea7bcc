"""The names of kernel calls in compiled programs and in profiles: handler, dtype and shapes."""

from __future__ import annotations

import doctest
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_module import NEEDS_CUDA_MODULE
from jax import export, lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from mesh_running import import_test_module, mesh, run_checks
from op_cases import OPS, op_case, values_and_gradients

import jaxgrad
from jaxgrad._src.native import cuda, ffi
from jaxgrad._src.native.ffi import ffi_call, kernel_name

pytestmark = pytest.mark.jax_version

# The calls of `values_and_gradients` of each `op_case` on a CPU.
NAMES = {
    "conv_general_dilated": {
        "jaxgrad_onednn_conv_forward-f32-x_2x4x6x4-w_6x2x3x2-y_2x6x3x5",
        "jaxgrad_onednn_conv_input_gradient-f32-dy_2x6x3x5-w_6x2x3x2-dx_2x4x6x4",
        "jaxgrad_onednn_conv_weight_gradient-f32-x_2x4x6x4-dy_2x6x3x5-dw_6x2x3x2",
    },
    "conv_transpose": {
        "jaxgrad_onednn_conv_forward-f32-x_2x5x8x3-w_3x2x2x3-y_2x5x4x2",
        "jaxgrad_onednn_conv_input_gradient-f32-dy_2x5x4x2-w_3x2x2x3-dx_2x5x8x3",
        "jaxgrad_onednn_conv_weight_gradient-f32-x_2x5x8x3-dy_2x5x4x2-dw_3x2x2x3",
    },
    "batch_norm_training": {
        "jaxgrad_cpu_norm_backward-f32-x_1x20x3x1-rstd_1x3",
        "jaxgrad_cpu_norm_forward-f32-x_1x20x3x1-rstd_1x3",
    },
    "batch_norm_inference": {
        "jaxgrad_cpu_norm_backward-f32-x_1x20x3x1-rstd_1x3",
        "jaxgrad_cpu_norm_normalize-f32-x_1x20x3x1-rstd_1x3",
    },
    "gru": {
        "jaxgrad_cpu_gru_backward-f32-x_5x2x3-w_2x12x3-r_2x12x4-y_5x2x2x4",
        "jaxgrad_cpu_gru_forward-f32-x_5x2x3-w_2x12x3-r_2x12x4-y_5x2x2x4",
    },
    "max_pool": {
        "jaxgrad_cpu_max_pool_forward-f32-x_2x6x4x3-y_2x3x4x3",
        "jaxgrad_cpu_max_pool_input_gradient-f32-x_2x6x4x3-y_2x3x4x3",
    },
    "avg_pool": {
        "jaxgrad_cpu_sum_pool_forward-f32-x_6x6x4x1-y_6x3x4x1",
        "jaxgrad_cpu_sum_pool_input_gradient-f32-x_6x6x4x1-y_6x3x4x1",
    },
    "group_norm": {
        "jaxgrad_cpu_norm_backward-f32-x_4x5x6x1-rstd_4x2",
        "jaxgrad_cpu_norm_forward-f32-x_4x5x6x1-rstd_4x2",
    },
    **{
        name: {
            "jaxgrad_cpu_norm_backward-f32-x_20x1x6x1-rstd_20x1",
            "jaxgrad_cpu_norm_forward-f32-x_20x1x6x1-rstd_20x1",
        }
        for name in ("layer_norm", "rms_norm")
    },
}


@pytest.fixture(autouse=True)
def _on_the_cpu() -> Iterator[None]:
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture
def without_gpu(monkeypatch) -> None:
    """Plans of cuDNN, and the layouts that they take, depend on the GPU."""
    monkeypatch.setattr(cuda, "gpu_ordinal", lambda: None)


def _with_kernels(op: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    case = op_case(op)
    return partial(values_and_gradients, case.call("cpu")), case.arrays


def _compiled(function: Callable[..., Any], *args: Any) -> str:
    return jax.jit(function).lower(*args).compile().as_text()


def _without_number(instruction: str) -> str:
    """The name of an instruction without the number that makes it unique in its program."""
    return re.sub(r"\.\d+$", "", instruction)


def _names(hlo: str) -> set[str]:
    """The names of the kernel calls of a compiled program. The arrays of each call must have the shapes in its name.

    Those of the GRU have a first axis of groups, which the name leaves out for one group.
    """
    lines = [line for line in hlo.splitlines() if 'custom_call_target="jaxgrad_' in line]
    found = {_without_number(line.split()[line.split()[0] == "ROOT"].lstrip("%")): line for line in lines}
    for name, line in found.items():
        target, dtype, *arrays = name.split("-")
        assert f'custom_call_target="{target}"' in line
        for array in arrays:
            first = "1," if "gru" in target else ""
            assert f"{dtype}[{first}{array.partition('_')[2].replace('x', ',')}]" in line
    return set(found)


def _op_names(hlo: str) -> set[str]:
    """The last components of the op_names of the kernel calls."""
    return set(re.findall(r'custom_call_target="jaxgrad_.*op_name="(?:[^"]*/)?([^"/]*)"', hlo))


def _locations(function: Callable[..., Any], *args: Any) -> set[str]:
    """The last components of the locations in a program lowered for CUDA that belong to kernel calls."""
    text = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    calls = re.findall(r"custom_call @(jaxgrad_\w+)\(.* loc\((#loc\d+)\)", text)
    names = [(target, re.search(rf'^{loc} = loc\("(?:[^"]*/)?([^"/]*)"', text, re.M)[1]) for target, loc in calls]
    assert all(name.startswith(f"{target}-") for target, name in names)
    return {name for _, name in names}


def _struct(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_xla_keeps_every_character(dtype):
    arrays = {"x": _struct(2, 0, 3, dtype=dtype), "scalar": _struct(dtype=dtype), "dw": _struct(16, dtype="float32")}
    name = kernel_name("jaxgrad_cpu_op_pass", arrays)
    assert name == f"jaxgrad_cpu_op_pass-{dtype.replace('float', 'f')}-x_2x0x3-scalar_-dw_16"
    assert re.fullmatch(r"[A-Za-z0-9_-]+", name)


def test_docstring():
    results = doctest.testmod(ffi, extraglobs={"jax": jax})
    assert results.attempted
    assert not results.failed


@pytest.mark.parametrize("op", OPS)
def test_compiled_program(op):
    function, arrays = _with_kernels(op)
    hlo = _compiled(function, *arrays)
    assert _names(hlo) == _op_names(hlo) == NAMES[op]


@pytest.mark.parametrize("op", ["batch_norm_training", "gru"])
def test_default_implementation(op):
    """The kernel is in a branch of `lax.platform_dependent`."""
    case = op_case(op)
    hlo = _compiled(partial(values_and_gradients, case.call(None)), *case.arrays)
    assert _names(hlo) == _op_names(hlo) == NAMES[op]


def test_profile(tmp_path):
    """Events in a trace of the profiler have the names of the instructions."""
    runs = [(jax.jit(function), arrays) for function, arrays in map(_with_kernels, OPS)]
    for function, arrays in runs:
        jax.block_until_ready(function(*arrays))
    with jax.profiler.trace(tmp_path):
        for function, arrays in runs:
            jax.block_until_ready(function(*arrays))
    (path,) = tmp_path.rglob("*.xplane.pb")
    with warnings.catch_warnings(action="ignore"):
        events = {
            _without_number(event.name)
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes
            for line in plane.lines
            for event in line.events
        }
    assert {name for name in events if name.startswith("jaxgrad_")} == set.union(*NAMES.values())


def test_convolution_in_another_dtype():
    """oneDNN computes float16 in float32."""

    def conv(x, w):
        return jaxgrad.conv_general_dilated(x, w, (1,), "VALID", implementation="onednn")

    hlo = _compiled(conv, _struct(2, 4, 9, dtype="float16"), _struct(6, 4, 3, dtype="float16"))
    assert _names(hlo) == {"jaxgrad_onednn_conv_forward-f32-x_2x4x9-w_6x4x3-y_2x6x7"}


def _conv(x, w):
    return jaxgrad.conv_general_dilated(x, w, (1, 1), "SAME", implementation="onednn")


def _gradients(x, w):
    return jax.grad(lambda x, w: jnp.sum(_conv(x, w) ** 2), (0, 1))(x, w)


def _conv_names(*, batch: int, problems: int | None = None) -> set[str]:
    """The names of the three passes for x [batch, 4, 6, 5] and w [3, 4, 3, 3]."""
    x, w, y = f"{batch}x4x6x5", ("" if problems is None else f"{problems}x") + "3x4x3x3", f"{batch}x3x6x5"
    return {
        f"jaxgrad_onednn_conv_forward-f32-x_{x}-w_{w}-y_{y}",
        f"jaxgrad_onednn_conv_input_gradient-f32-dy_{y}-w_{w}-dx_{x}",
        f"jaxgrad_onednn_conv_weight_gradient-f32-x_{x}-dy_{y}-dw_{w}",
    }


X, W = _struct(8, 4, 6, 5, dtype="float32"), _struct(3, 4, 3, 3, dtype="float32")


def test_vmap():
    """The name has the shapes that the kernel receives: the mapped axis is part of the batch."""
    stacked = [_struct(2, *array.shape, dtype="float32") for array in (X, W)]
    hlo = _compiled(jax.vmap(_gradients), *stacked)
    assert _names(hlo) == _op_names(hlo) == _conv_names(batch=16, problems=2)


def test_scan_and_checkpoint():
    @jax.checkpoint
    def layer(x, w):
        return jnp.tanh(jnp.pad(_conv(x, w), ((0, 0), (0, 1), (0, 0), (0, 0))))

    def loss(x, weights):
        return jnp.sum(lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0])

    hlo = _compiled(jax.grad(loss, (0, 1)), X, _struct(5, *W.shape, dtype="float32"))
    assert _names(hlo) == _op_names(hlo) == _conv_names(batch=8)


def test_inside_a_lowering_rule():
    """A primitive whose lowering rule traces a kernel call, twice in one program: JAX caches the lowering."""

    def statistics(x):
        statistic = _struct(8, 3, dtype="float32")
        named = {"x": x, "rstd": statistic}
        target, attributes = "jaxgrad_cpu_norm_statistics", {"centered": True, "epsilon": 1e-5}
        return ffi_call(target, [statistic] * 4, (x,), 0, named=named, **attributes)[0]

    primitive = Primitive("test_names_outer")
    primitive.def_abstract_eval(lambda x: jax.core.ShapedArray((8, 3), x.dtype))
    mlir.register_lowering(primitive, mlir.lower_fun(lambda x: jax.jit(statistics)(2 * x), multiple_results=False))
    hlo = _compiled(lambda x: primitive.bind(x) + primitive.bind(x + 1), X)
    assert _names(hlo) == _op_names(hlo) == {"jaxgrad_cpu_norm_statistics-f32-x_8x4x6x5-rstd_8x3"}


def test_exported_program():
    exported = export.export(jax.jit(_gradients), platforms=["cpu"], disabled_checks=jaxgrad.export_disabled_checks())(
        X, W
    )
    assert _names(_compiled(export.deserialize(exported.serialize()).call, X, W)) == _conv_names(batch=8)


def test_without_jit():
    """A kernel call that is no part of a jitted function is compiled alone."""
    function, arrays = _with_kernels("gru")
    arrays = jax.device_put(arrays)
    expected = jax.jit(function)(*arrays)
    with jax.disable_jit():
        found = function(*arrays)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


def _check_jit_over_a_mesh():
    """XLA's partitioner replaces op_name, but keeps the names of instructions: the shapes are those of one device."""
    devices = mesh()
    with jax.set_mesh(devices):
        x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(devices, P("d")))
        hlo = _compiled(_gradients, x, W)
    assert _names(hlo) == _conv_names(batch=1), _names(hlo)
    assert _op_names(hlo) == {"custom_partitioning"}, _op_names(hlo)
    assert len(re.findall(r'op_name="[^"]*jaxgrad\.conv_(forward|input_gradient|weight_gradient)\.', hlo)) >= 3


def _check_explicit_axes():
    devices = mesh(explicit=True)
    with jax.set_mesh(devices):
        x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(devices, P("d")))
        hlo = _compiled(_gradients, x, W)
    assert _names(hlo) == _op_names(hlo) == _conv_names(batch=1), _names(hlo)


def _check_shard_map():
    for check_vma in (True, False):
        split = jax.shard_map(
            _gradients, mesh=mesh(), in_specs=(P("d"), P()), out_specs=(P("d"), P("d")), check_vma=check_vma
        )
        hlo = _compiled(lambda x, w, split=split: split(x, w), X, W)
        assert _names(hlo) == _op_names(hlo) == _conv_names(batch=1), _names(hlo)


def test_over_a_mesh(run_python):
    checks = _check_jit_over_a_mesh, _check_explicit_axes, _check_shard_map
    run_checks(run_python, "cpu", __file__, [check.__name__ for check in checks])


@NEEDS_CUDA_MODULE
@pytest.mark.usefixtures("without_gpu")
def test_cudnn_convolution():
    """As XLA does on current GPUs, the calls take arrays with the features last."""

    def loss(x, w):
        y = jaxgrad.conv_general_dilated(x, w, (2, 2), ((2, 1), (1, 0)), implementation="cudnn")
        return jnp.sum(y.astype(jnp.float32) ** 2)

    assert _locations(jax.grad(loss, (0, 1)), _struct(8, 64, 32, 30), _struct(16, 64, 3, 3)) == {
        "jaxgrad_cudnn_conv_forward-bf16-x_8x32x30x64-w_16x3x3x64-y_8x17x15x16",
        "jaxgrad_cudnn_conv_input_gradient-bf16-dy_8x17x15x16-w_16x3x3x64-dx_8x32x30x64",
        "jaxgrad_cudnn_conv_weight_gradient-bf16-x_8x32x30x64-dy_8x17x15x16-dw_16x3x3x64",
    }


@NEEDS_CUDA_MODULE
@pytest.mark.usefixtures("without_gpu")
def test_cudnn_batch_norm():
    def loss(x, scale):
        y, *_ = jaxgrad.batch_norm_training(x, scale, scale, implementation="cudnn")
        return jnp.sum(y.astype(jnp.float32) ** 2)

    assert _locations(jax.grad(loss), _struct(32, 8, 6, 24), _struct(24, dtype="float32")) == {
        "jaxgrad_cudnn_batch_norm_forward-bf16-x_32x8x6x24-mean_24",
        "jaxgrad_cudnn_batch_norm_backward-bf16-x_32x8x6x24-mean_24",
    }


_DEPTHWISE = """
import jax, jax.numpy as jnp
import jaxgrad
from jaxgrad._src.native import cuda

cuda.gpu_ordinal = lambda: 0

def loss(x, w):
    y = jaxgrad.conv_general_dilated(x, w, (1, 1), "SAME", feature_group_count=32, implementation="cuda")
    return jnp.sum(y ** 2)

arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, 32, 20, 18), (32, 1, 7, 5))]
found = test_names._locations(jax.grad(loss, 1), *arrays)
assert found == {
    "jaxgrad_cuda_depthwise_forward-f32-x_8x20x18x32-w_32x1x7x5-y_8x20x18x32",
    "jaxgrad_cuda_depthwise_weight_gradient-f32-x_8x20x18x32-dy_8x20x18x32-dw_32x1x7x5",
}, found
"""


@NEEDS_CUDA_MODULE
def test_depthwise_cuda_kernel(run_python, fake_cuda):
    """The kernel takes channels-last operands. The libraries of CUDA are fakes."""
    script = import_test_module(__file__, "test_names") + _DEPTHWISE
    run_python(script, LD_LIBRARY_PATH=str(fake_cuda), JAX_PLATFORMS="cpu", FAKE_ENGINES="11:100:30")
