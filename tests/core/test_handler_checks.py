"""Calls of the CPU handlers whose operands, results or attributes contradict each other: errors, and no crash.

Python never makes such calls; a program that was changed or lowered elsewhere may. .ci/sanitize runs this module with
AddressSanitizer, which finds a handler that reads or writes beyond its buffers.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import CPU_KERNEL
from op_cases import OPS, op_case, values_and_gradients

import jaxgrad
from jaxgrad._src.native import cpu, ffi
from jaxgrad._src.norm.cpu import CpuBackend
from jaxgrad._src.norm.params import NormParams

CALLS_OF_EACH_HANDLER = 25


class HandlerCall(NamedTuple):
    target: str
    operands: tuple[Any, ...]  # shapes and dtypes
    results: tuple[Any, ...]
    attributes: dict[str, Any]

    def run(self) -> Any:
        """Runs the handler on operands of ones."""
        operands = [np.ones(operand.shape, operand.dtype) for operand in self.operands]
        attributes = {name: ffi._attribute(value) for name, value in self.attributes.items()}
        with jax.default_device(CPU_KERNEL.device):
            call = jax.jit(lambda *operands: jax.ffi.ffi_call(self.target, self.results)(*operands, **attributes))
            return jax.block_until_ready(call(*operands))


def _depthwise(x, w, bias):
    """A depthwise convolution, which runs on jaxgrad's own kernels."""
    numbers = ("NWC", "WIO", "NWC")
    settings = {"dimension_numbers": numbers, "feature_group_count": 6, "implementation": "cpu"}
    return jaxgrad.conv_general_dilated(x, w, (2,), "SAME", bias=bias, **settings)


@pytest.fixture(scope="module")
def calls() -> dict[str, HandlerCall]:
    """A call of each handler, as an op makes it."""
    found: dict[str, HandlerCall] = {}
    with pytest.MonkeyPatch.context() as patch:
        bind = ffi._handler_call_p.bind

        def recording(*operands, target, results, attributes, **others):
            shapes = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in operands)
            results_of = tuple(jax.ShapeDtypeStruct(r.shape, r.dtype) for r in results)
            found[target] = HandlerCall(target, tuple(shapes), results_of, dict(attributes))
            return bind(*operands, target=target, results=results, attributes=attributes, **others)

        patch.setattr(ffi._handler_call_p, "bind", recording)
        jax.clear_caches()
        for op in OPS:
            case = op_case(op)
            jax.eval_shape(lambda *arrays, c=case: values_and_gradients(c.call("cpu"), *arrays), *case.arrays)
        jax.eval_shape(
            partial(values_and_gradients, _depthwise),
            *(jnp.ones(shape, "float32") for shape in ((2, 5, 6), (3, 1, 6), (6,))),
        )
        # Statistics alone are a step of calls over a mesh.
        params = NormParams("group_norm", 2, 1e-5, None, sample_axes=1, num_groups=2)
        jax.eval_shape(partial(CpuBackend().statistics, params), jnp.ones((1, 4, 5, 6), "float32"))
        with jaxgrad.forward_mode():
            case = op_case("max_pool")
            jax.eval_shape(lambda x: jax.jvp(case.call("cpu"), (x,), (x,)), *case.arrays)
        jax.clear_caches()
    assert set(found) == set(cpu.targets())
    return found


def _damaged(call: HandlerCall, rng: np.random.Generator) -> tuple[HandlerCall, str]:
    """The call with one random change, and the change in words."""
    operands, results, attributes = list(call.operands), list(call.results), dict(call.attributes)
    arrays = operands if rng.random() < 0.6 else results
    takes_any_workspace = arrays is results and "onednn_conv" in call.target  # the last result
    i = int(rng.integers(len(arrays) - takes_any_workspace))
    shape, dtype = arrays[i].shape, arrays[i].dtype
    kind = str(rng.choice(["size", "rank", "dtype", "attribute"], p=[0.5, 0.2, 0.1, 0.2]))
    if kind == "attribute":
        name = str(rng.choice(sorted(attributes)))
        value = attributes[name]
        worse = -7 if np.isscalar(value) else (*value[:-1], -7) if rng.random() < 0.5 else value[1:]
        attributes[name] = type(value)(worse)
        return HandlerCall(call.target, call.operands, call.results, attributes), f"{name}={attributes[name]}"
    if kind == "size":
        axis = int(rng.integers(len(shape)))
        size = int(rng.choice([0, 1, max(0, shape[axis] - 1), shape[axis] + 1, 2 * shape[axis] + 1]))
        shape = (*shape[:axis], size, *shape[axis + 1 :])
    elif kind == "rank":
        shape = shape[1:] if rng.random() < 0.5 else (*shape, 2)
    else:
        dtype = np.dtype(rng.choice(["float16", "int32", "uint8"]))
    arrays[i] = jax.ShapeDtypeStruct(shape, dtype)
    of = "operand" if arrays is operands else "result"
    return HandlerCall(call.target, tuple(operands), tuple(results), attributes), f"{of} {i} {dtype}{list(shape)}"


@pytest.mark.parametrize("target", cpu.targets())
def test_contradicting_calls(calls, target):
    """Most random changes of a call are errors, which name the handler. The others are calls of another geometry."""
    call = calls[target]
    call.run()
    rng = np.random.default_rng(list(target.encode()))
    accepted, unnamed = [], []
    for _ in range(CALLS_OF_EACH_HANDLER):
        damaged, change = _damaged(call, rng)
        try:
            damaged.run()
        except jax.errors.JaxRuntimeError as error:
            if target not in str(error) and "decode" not in str(error):  # XLA decodes the workspace, an array of bytes
                unnamed.append(f"{change}: {error}")
        else:
            accepted.append(change)
    assert not unnamed
    assert len(accepted) <= CALLS_OF_EACH_HANDLER // 3, accepted
