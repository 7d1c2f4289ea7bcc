"""The only use of `jax.ffi.ffi_lowering`: every compiled handler is called through `ffi_call` below.

Conventions of all handlers: an absent operand and a result that is not needed are arrays without elements, and the last
result is the workspace.

XLA names an instruction after its location in the program, and profiles show that name. JAX puts the primitive's name
there; here it is the name of the handler and the shapes, see `kernel_name`. One primitive serves all of them: JAX keeps
the lowering rule of each primitive for good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import mlir

from jaxgrad._src.native.compiled import require_handler


def ffi_call(
    target: str,
    results: Sequence[jax.ShapeDtypeStruct],
    operands: Sequence[jax.Array],
    workspace: int,
    *,
    named: Mapping[str, Any],
    **attributes: Any,
) -> list[jax.Array]:
    """Calls a handler.

    Args:
      target: the name under which the handler is registered.
      results: the shapes and dtypes of the results.
      operands: the operands.
      workspace: bytes of workspace, passed to the handler as one more result.
      named: by name, the operands and results whose shapes profiles show; see `kernel_name`.
      **attributes: bools, ints, floats and sequences of ints.

    Returns:
      The results without the workspace.
    """
    require_handler(target)
    results = (*results, jax.ShapeDtypeStruct((workspace,), np.uint8))
    *found, _ = _handler_call_p.bind(
        *operands,
        name=kernel_name(target, named),
        target=target,
        results=tuple(jax.core.ShapedArray(result.shape, result.dtype) for result in results),
        attributes=tuple((name, _hashable(value)) for name, value in sorted(attributes.items())),
    )
    return found


def kernel_name(target: str, named: Mapping[str, Any]) -> str:
    """Returns the name of a call in HLO and in profiles: the target, the dtype of the first array, and the shapes.

    XLA replaces characters other than letters, digits, "_" and "-" in the names of instructions, and cuts off a number
    at the end that follows a dot. The name has none of these, so that it is the same everywhere.

    Examples:
      >>> x, w, y = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((8, 3, 32), (16, 3, 5), (8, 16, 32)))
      >>> kernel_name("jaxgrad_onednn_conv_forward", {"x": x, "w": w, "y": y})
      'jaxgrad_onednn_conv_forward-bf16-x_8x3x32-w_16x3x5-y_8x16x32'
    """
    dtype = short_dtype(next(iter(named.values())).dtype)
    return "-".join((target, dtype, *(f"{name}_{'x'.join(map(str, array.shape))}" for name, array in named.items())))


def short_dtype(dtype: Any) -> str:
    """Returns "f32" for float32, "bf16" for bfloat16, and the names of other types as they are."""
    return np.dtype(dtype).name.replace("float", "f")


def empty_if_none(array: jax.Array | None, dtype: Any) -> jax.Array:
    """Returns the operand of a handler for an array that may be absent."""
    return jnp.zeros((0,), dtype) if array is None else array


def without_groups(array: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array for `kernel_name`, without a first axis of one group."""
    shape = array.shape[1:] if array.shape[0] == 1 else array.shape
    return jax.ShapeDtypeStruct(shape, array.dtype)


def empty_like(shape: Any) -> jax.ShapeDtypeStruct:
    """Returns the result of a handler that is not needed, of the dtype of `shape`."""
    return jax.ShapeDtypeStruct((0,), shape.dtype)


def _abstract_eval(*operands, name, target, results, attributes):
    # On the mesh of the context, as the results of `jax.ffi.ffi_call`: inside `shard_map` that is the mesh of the call.
    sharding = jax.sharding.NamedSharding(jax.sharding.get_abstract_mesh(), jax.sharding.PartitionSpec())
    return [result.update(sharding=sharding) for result in results]


def _impl(*operands, **params):
    with jax.disable_jit(False):
        return _jitted(operands, **params)


@partial(jax.jit, static_argnames=("name", "target", "results", "attributes"))
def _jitted(operands, **params):
    return _handler_call_p.bind(*operands, **params)


def _lowering(ctx, *operands, name, target, results, attributes):
    rule = jax.ffi.ffi_lowering(target)
    # JAX lowers the calls of a primitive once, without the stack of names and the line of source, and adds those for
    # each call. XLA takes the last component of a name before a colon for the instruction's.
    with ir.Location.name(f"{name}:", ir.Location.name(name)):
        return rule(ctx, *operands, **{key: _attribute(value) for key, value in attributes})


_handler_call_p = Primitive("jaxgrad_handler_call")
_handler_call_p.multiple_results = True
_handler_call_p.def_abstract_eval(_abstract_eval)
_handler_call_p.def_impl(_impl)
mlir.register_lowering(_handler_call_p, _lowering)


def _hashable(value: Any) -> Any:
    return value if np.isscalar(value) else tuple(value)


def _attribute(value: Any) -> Any:
    """The NumPy type that fixes the attribute's type: Python's scalars follow JAX's 64-bit flag."""
    if isinstance(value, bool):
        return np.bool_(value)
    if isinstance(value, int):
        return np.int64(value)
    if isinstance(value, float):
        return np.float64(value)
    return np.array(value, np.int64)
