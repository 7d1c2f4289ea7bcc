"""Calls of handlers with arrays and attributes that no op passes, on the CPU, and on a fake GPU.

Programs reach the handlers without jaxgrad's checks if they were exported elsewhere, or call `jax.ffi.ffi_call`. A bad
attribute is an error. A bad array is an error too, unless it stands for an absent one. Neither ends the process.
"""

from __future__ import annotations

import pytest
from cuda_module import ENGINES, NEEDS_CUDA_MODULE

_SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
import jaxgrad

jax.config.update("jax_enable_x64", True)
HUGE = 2**62
G, T, B, I, H, D = 6, 3, 2, 4, 5, 1
conv = dict(lhs_spec=(0, 1, 2, 3), rhs_spec=(0, 1, 2, 3), out_spec=(0, 1, 2, 3), window_strides=(1, 1),
            padding=(0, 0, 0, 0), rhs_dilation=(1, 1), feature_group_count=2)
x, w, y, bias = (2, 4, 6, 5), (4, 2, 3, 3), (2, 4, 4, 3), (4,)
depthwise, depthwise_w = {**conv, "feature_group_count": 4}, (4, 1, 3, 3)
last_x, last_w, last_y = (2, 6, 5, 4), (3, 3, 1, 4), (2, 4, 3, 4)
last = {**depthwise, "lhs_spec": (0, 3, 1, 2), "rhs_spec": (3, 2, 0, 1), "out_spec": (0, 3, 1, 2)}
gru = dict(direction=0, linear_before_reset=False, batch_major=False, clip=np.inf)
lens, reset = (G, B), (G, T, B)
OWN_DTYPES = {lens: "int32", reset: "bool"}  # other arrays have the dtype of the call
gru_x, gru_w, gru_r, gru_b = (G, T, B, I), (G, D, 3 * H, I), (G, D, 3 * H, H), (G, D, 6 * H)
h, states, gates = (G, D, B, H), (G, T, D, B, H), (G, T, D, B, 3 * H)
norm_x, kc, g, c = (2, 4, 6, 5), (1, 6), (2, 3), (4,)
pool = dict(window=(3, 2), strides=(1, 1), padding=(1, 0, 0, 2), dilation=(1, 2))
pool_x, pool_y = (2, 6, 5, 4), (2, 5, 5, 4)
cudnn = {**last, "feature_group_count": 2, "rhs_spec": (0, 3, 1, 2), "allow_tf32": False, "deterministic": False,
         "search": 1}
cudnn_w, untransposed = (3, 3, 2, 4), (4, 3, 3, 2)
cudnn_dw = {"dw_spec": (3, 2, 0, 1), "dw_reversed": True}
cudnn_bn = dict(feature_axis=2, epsilon=1e-5, relu=True)
bn_last = (3, 5, 4)
cuda_gru = dict(reversed=0, linear_before_reset=True, clip=np.inf, allow_tf32=True)
inputs, linear_gates = (G, T, B, D, 3, H), (G, T, D, B, 4 * H)

# By target: the shapes of the operands, the shapes of the results without the workspace, and the attributes.
def norm_calls(prefix):
    return {
        f"{prefix}_statistics": ((norm_x,), (g,) * 4, dict(epsilon=1e-5, centered=True)),
        f"{prefix}_normalize": ((norm_x, kc, kc, g, g, g, norm_x), (norm_x,), dict(activation=2)),
        f"{prefix}_forward": (
            (norm_x, kc, kc, norm_x), (norm_x, g, g, g, g), dict(epsilon=1e-5, activation=1, centered=True)),
        f"{prefix}_backward": (
            (norm_x, kc, kc, g, g, g, norm_x, norm_x, norm_x, g, g), (norm_x, kc, kc, norm_x),
            dict(frozen=False, centered=True, activation=2)),
    }

CALLS = {
    "jaxgrad_onednn_conv_forward": ((x, w, bias), (y,), conv),
    "jaxgrad_onednn_conv_input_gradient": ((y, w), (x,), conv),
    "jaxgrad_onednn_conv_weight_gradient": ((x, y), (w, bias), conv),
    "jaxgrad_cpu_depthwise_forward": ((x, depthwise_w, bias), (y,), {**depthwise, "relu": True}),
    "jaxgrad_cpu_depthwise_input_gradient": ((y, depthwise_w), (x,), depthwise),
    "jaxgrad_cpu_depthwise_weight_gradient": ((x, y), (depthwise_w, bias), depthwise),
    "jaxgrad_cpu_gru_forward": ((gru_x, gru_w, gru_r, gru_b, lens, h, reset, h), (states, h, gates), gru),
    "jaxgrad_cpu_gru_backward": (
        (gru_x, gru_w, gru_r, lens, h, reset, h, states, gates, states, h), (gru_x, gru_w, gru_r, gru_b, h, h), gru),
    **norm_calls("jaxgrad_cpu_norm"),
    "jaxgrad_cpu_max_pool_forward": ((pool_x,), (pool_y,), pool),
    "jaxgrad_cpu_max_pool_input_gradient": ((pool_x, pool_y), (pool_x,), pool),
    "jaxgrad_cpu_max_pool_tangent": ((pool_x, pool_x), (pool_y,), pool),
    "jaxgrad_cpu_sum_pool_forward": ((pool_x,), (pool_y,), {**pool, "divisor": 5}),
    "jaxgrad_cpu_sum_pool_input_gradient": ((pool_y,), (pool_x,), {**pool, "divisor": 5}),
}
if "_cu" in TARGET:
    import fake_gpu  # the handlers run in programs for the CPU
    CALLS = {
        "jaxgrad_cuda_gru_forward": (
            (inputs, gru_r, gru_b, lens, h, reset, h), (states, h, linear_gates), cuda_gru),
        "jaxgrad_cuda_gru_backward": (
            (gru_r, lens, h, reset, h, states, linear_gates, states, h), (inputs, inputs, h, h), cuda_gru),
        "jaxgrad_cuda_depthwise_forward": ((last_x, last_w, bias), (last_y,), {**last, "relu": True}),
        "jaxgrad_cuda_depthwise_input_gradient": ((last_y, last_w), (last_x,), last),
        "jaxgrad_cuda_depthwise_weight_gradient": ((last_x, last_y), (last_w,), last),
        "jaxgrad_cudnn_conv_forward": ((last_x, untransposed, bias), (last_y,), {**cudnn, "relu": True}),
        "jaxgrad_cudnn_conv_input_gradient": ((last_y, untransposed), (last_x,), cudnn),
        "jaxgrad_cudnn_conv_weight_gradient": ((last_x, last_y), (cudnn_w, untransposed), {**cudnn, **cudnn_dw}),
        "jaxgrad_cudnn_batch_norm_forward": ((bn_last, c, c, bn_last), (bn_last, c, c, (2, *c)), cudnn_bn),
        "jaxgrad_cudnn_batch_norm_backward": ((bn_last, bn_last, c, c, c, c), (bn_last, c, c), cudnn_bn),
        **norm_calls("jaxgrad_cuda_norm"),
        "jaxgrad_cuda_max_pool_forward": ((pool_x,), (pool_y,), pool),
        "jaxgrad_cuda_max_pool_input_gradient": ((pool_x, pool_y), (pool_x,), pool),
        "jaxgrad_cuda_max_pool_tangent": ((pool_x, pool_x), (pool_y,), pool),
        "jaxgrad_cuda_sum_pool_forward": ((pool_x,), (pool_y,), {**pool, "divisor": 5}),
        "jaxgrad_cuda_sum_pool_input_gradient": ((pool_y,), (pool_x,), {**pool, "divisor": 5}),
    }
    assert CALLS.keys() == set(jaxgrad._src.native.cuda.targets()), "a handler is not tested"
else:
    assert CALLS.keys() == set(jaxgrad._src.native.cpu.targets()), "a handler is not tested"

def as_attribute(value):
    kind = {bool: np.bool_, int: np.int64, float: np.float64}
    return kind[type(value)](value) if not isinstance(value, tuple) else np.array(value, np.int64)

def call(target, operands, results, attributes, dtype="float32", own_dtypes=OWN_DTYPES, workspace=1 << 16):
    dtypes = [own_dtypes.get(shape, dtype) for shape in CALLS[target][0]]
    results = [*(jax.ShapeDtypeStruct(shape, dtype) for shape in results), jax.ShapeDtypeStruct((workspace,), "uint8")]
    attributes = {name: as_attribute(value) for name, value in attributes.items()}

    def run(*arrays):
        arrays = arrays or map(jnp.ones, operands, dtypes)
        return jax.ffi.ffi_call(target, results)(*arrays, **attributes)

    try:
        arrays = list(map(np.ones, operands, dtypes))  # XLA compiles programs with arguments faster
    except ValueError:  # NumPy refuses some empty shapes
        arrays = []
    return jax.block_until_ready(jax.jit(run)(*arrays))

def bad_attributes(value):
    if isinstance(value, tuple):
        yield from ((), value[:-1], (*value, 0), (*value, *value), tuple(-1 - v for v in value))
        for i in range(len(value)):
            for bad in (-1, HUGE, 2 * HUGE - 1):
                yield (*value[:i], bad, *value[i + 1 :])
    elif isinstance(value, float):
        yield from (-1.0, float("nan"), -float("inf"))
    elif not isinstance(value, bool):
        yield from (-1, 3, HUGE, 2 * HUGE - 1, -2 * HUGE)

def bad_shapes(shape):
    yield from ((), (0,), (1, *shape), shape[1:], (1,) * 9, (0, *[2**40] * (len(shape) - 1)))
    for i in range(len(shape)):
        for bad in (0, shape[i] + 1):
            yield (*shape[:i], bad, *shape[i + 1 :])

def replaced(shapes, i, shape):
    return (*shapes[:i], shape, *shapes[i + 1 :])

def is_error(target, *arguments, **settings):
    try:
        call(target, *arguments, **settings)
    except jax.errors.JaxRuntimeError as error:
        assert target in str(error), error
        return True
    return False

operands, results, attributes = CALLS[TARGET]
if BATCH_MAJOR:
    attributes = {**attributes, "batch_major": True}
    swapped = {gru_x: (G, B, T, I), states: (G, B, T, D, H)}
    operands, results = (tuple(swapped.get(shape, shape) for shape in arrays) for arrays in (operands, results))
    assert is_error(TARGET, *CALLS[TARGET][:2], attributes)
call(TARGET, operands, results, attributes)
for name, value in attributes.items():
    few = {"divisor": (-1, 0, -HUGE), "activation": (-1, 4, HUGE)}
    for bad in few.get(name) or bad_attributes(value):
        print(name, bad, flush=True)
        assert is_error(TARGET, operands, results, {**attributes, name: bad}), (name, bad)
for dtype in ("int8", "uint16", "complex128", "bool", "int64"):
    print(dtype, flush=True)
    assert is_error(TARGET, operands, results, attributes, dtype=dtype), dtype
for shape in sorted(OWN_DTYPES.keys() & set(operands)):
    for dtype in ("int8", "uint32", "float32"):
        print(shape, dtype, flush=True)
        assert is_error(TARGET, operands, results, attributes, own_dtypes={**OWN_DTYPES, shape: dtype}), (shape, dtype)
for i, shape in enumerate(operands):
    for bad in bad_shapes(shape):
        print("operand", i, bad, flush=True)
        if not is_error(TARGET, replaced(operands, i, bad), results, attributes):
            assert 0 in bad or TARGET.endswith("statistics") or bad in ((1, *w), (1, *depthwise_w)), bad
for i, shape in enumerate(results):
    for bad in bad_shapes(shape):
        print("result", i, bad, flush=True)
        if not is_error(TARGET, operands, replaced(results, i, bad), attributes):
            assert 0 in bad or bad in ((1, *w), (1, *depthwise_w)), bad
def reshaped(shapes):  # by old shape
    return [[shapes.get(shape, shape) for shape in arrays] for arrays in (operands, results)]

if "onednn" in TARGET:
    problems = reshaped({x: (4, *x[1:]), y: (4, *y[1:])})  # w seems to have an axis of four independent problems
    for name in ("lhs_spec", "out_spec"):
        print("rhs_spec of three axes and no", name, flush=True)
        assert is_error(TARGET, *problems, {**attributes, "rhs_spec": (0, 1, 2), name: ()}), name
    print("a dilated window of 2**64 + 1", flush=True)
    arrays = reshaped({w: (4, 2, 5, 3), y: (2, 4, 6, 3)})
    assert is_error(TARGET, *arrays, {**attributes, "rhs_dilation": (HUGE, 1)})
if "cuda_gru_backward" in TARGET:
    print("the gradient of an absent reset_h", flush=True)
    assert is_error(TARGET, replaced(operands, 4, (0,)), results, attributes)
if "cudnn_conv" in TARGET:
    print("a dilated window of 2**64 + 1", flush=True)
    windows = {untransposed: (4, 5, 3, 2), cudnn_w: (5, 3, 2, 4)}
    assert is_error(TARGET, *reshaped({**windows, last_y: (2, 6, 3, 4)}), {**attributes, "rhs_dilation": (HUGE, 1)})
if "cudnn_conv_weight" in TARGET:
    print("a reversed window without a transpose", flush=True)
    assert is_error(TARGET, *reshaped({cudnn_w: untransposed}), {**attributes, "dw_spec": cudnn["rhs_spec"]})
if "cudnn_batch_norm" in TARGET:
    for shape in ((0, 5, 4), (0, 2**40, 4), (3, 0, 4)):
        print("no elements", shape, flush=True)
        assert is_error(TARGET, *reshaped({bn_last: shape}), attributes)
    print("relu where the channels are not last", flush=True)
    assert is_error(TARGET, *reshaped({bn_last: (3, 4, 5)}), {**attributes, "feature_axis": 1})
if "cpu_depthwise" in TARGET:
    print("features in the middle", flush=True)
    assert is_error(TARGET, *reshaped({x: (6, 4, 5, 2)}), {**attributes, "lhs_spec": (3, 1, 0, 2)})
    print("two input features of a group", flush=True)
    assert is_error(TARGET, *reshaped({depthwise_w: w}), {**attributes, "feature_group_count": 2})
if "cpu_gru" in TARGET:
    print("no hidden units", flush=True)
    without = {s: tuple(n * (n % H > 0) for n in s) for s in (gru_w, gru_r, gru_b, h, states, gates)}
    assert is_error(TARGET, *reshaped(without), attributes)
print("workspace", flush=True)
if "cpu" in TARGET:  # the convolutions allocate a workspace then, and the CUDA kernels need none
    assert is_error(TARGET, operands, results, attributes, workspace=3)
"""

_TARGETS = [
    *(f"jaxgrad_onednn_conv_{name}" for name in ("forward", "input_gradient", "weight_gradient")),
    *(f"jaxgrad_cpu_depthwise_{name}" for name in ("forward", "input_gradient", "weight_gradient")),
    *(f"jaxgrad_cpu_gru_{name}" for name in ("forward", "backward")),
    *(f"jaxgrad_cpu_norm_{name}" for name in ("statistics", "normalize", "forward", "backward")),
    *(f"jaxgrad_cpu_max_pool_{name}" for name in ("forward", "input_gradient", "tangent")),
    *(f"jaxgrad_cpu_sum_pool_{name}" for name in ("forward", "input_gradient")),
]


@pytest.mark.parametrize(
    ("target", "batch_major"),
    [*((target, False) for target in _TARGETS), *((target, True) for target in _TARGETS if "gru" in target)],
)
def test_bad_calls_are_errors(target, batch_major, fork_python):
    fork_python(f"TARGET, BATCH_MAJOR = {target!r}, {batch_major}\n{_SCRIPT}", JAX_PLATFORMS="cpu")


@NEEDS_CUDA_MODULE
@pytest.mark.parametrize(
    "name",
    [
        *(f"{op}_{name}" for op in ("cuda_gru", "cudnn_batch_norm") for name in ("forward", "backward")),
        *(
            f"{op}_{name}"
            for op in ("cuda_depthwise", "cudnn_conv")
            for name in ("forward", "input_gradient", "weight_gradient")
        ),
        *(f"cuda_norm_{name}" for name in ("forward", "statistics", "normalize", "backward")),
        *(f"cuda_max_pool_{name}" for name in ("forward", "input_gradient", "tangent")),
        *(f"cuda_sum_pool_{name}" for name in ("forward", "input_gradient")),
    ],
)
def test_bad_calls_on_a_gpu_are_errors(name, fork_python, fake_cuda):
    libraries = {"LD_LIBRARY_PATH": str(fake_cuda), "FAKE_ENGINES": ENGINES, "FAKE_FUSED": "3", "FAKE_BATCH_NORM": "64"}
    script = f"TARGET, BATCH_MAJOR = {f'jaxgrad_{name}'!r}, False\n{_SCRIPT}"
    fork_python(script, JAX_PLATFORMS="cpu", **libraries)
