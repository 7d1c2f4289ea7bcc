"""Runs a convolution and its gradients in one compiled call, compares results, and counts the calls in programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from backends import Backend
from conv_cases import FIELDS, ConvInputs
from tolerances import assert_close

import jaxgrad

PASSES = ("forward", "input_gradient", "weight_gradient")


class Result(NamedTuple):
    """The result and the gradients. A gradient that is not requested, or of an absent operand, is None."""

    y: Any
    lhs: Any
    rhs: Any
    bias: Any


def conv(backend: Backend, **settings: Any) -> Callable[..., jax.Array]:
    return partial(_call, jaxgrad.conv_general_dilated, {**settings, "implementation": backend.implementation})


def conv_transpose(backend: Backend, **settings: Any) -> Callable[..., jax.Array]:
    return partial(_call, jaxgrad.conv_transpose, {**settings, "implementation": backend.implementation})


def _call(op, settings, lhs, rhs, bias=None):
    return op(lhs, rhs, bias=bias, **settings)


def run(op: Callable[..., Any], inputs: ConvInputs, dy: Any, requested: Sequence[str] = FIELDS) -> Result:
    """`op(lhs, rhs, bias)` and the gradients of <op, dy>, as NumPy arrays."""
    requested = [name for name in requested if getattr(inputs, name) is not None]

    def both(inputs, dy):
        def values(differentiated):
            return op(*inputs._replace(**differentiated))

        y, pullback = jax.vjp(values, {name: getattr(inputs, name) for name in requested})
        return y, pullback(dy)[0]

    # Compilation takes most of the time of the suite, and the arrays are small. With --jax-defaults, as users compile.
    options = {"xla_backend_optimization_level": 0} if jax.config.jax_enable_x64 else None
    y, gradients = jax.jit(both, compiler_options=options)(inputs, dy)
    return Result(np.asarray(y), *(None if name not in requested else np.asarray(gradients[name]) for name in FIELDS))


def terms(inputs: ConvInputs, y: Any) -> int:
    """An upper bound on the length of the longest sum in any result, for the tolerances."""
    return max(inputs.rhs.size, y.size // min(y.shape))


def assert_same(
    actual: Result, expected: Result, *, dtype: str, terms: int, message: str = "", rounding: str | None = None
) -> None:
    """Compares the results that are not None in `actual`; `rounding` as in `assert_close`."""
    for name, found, desired in zip(Result._fields, actual, expected, strict=True):
        if found is not None:
            assert_close(found, desired, dtype=dtype, terms=terms, name=f"{name} of {message}", rounding=rounding)


def calls(hlo: str) -> dict[str, int]:
    """Number of calls of each kernel in a compiled or lowered program."""
    lines = [line for line in hlo.splitlines() if "custom_call" in line or "custom-call" in line]
    names = {kind: (f"_conv_{kind}", f"_depthwise_{kind}") for kind in PASSES}
    return {kind: sum(any(name in line for name in names[kind]) for line in lines) for kind in PASSES}


def compiled_calls(function: Callable[..., Any], *args: Any) -> tuple[int, int, int]:
    """Number of calls of each kernel in a compiled function, in the order of PASSES."""
    found = calls(jax.jit(function).lower(*args).compile().as_text())
    return tuple(found[kind] for kind in PASSES)
