"""Runs the op forward and backward in one compiled call, and compares with the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import references
from cases import Case, Cotangents, Inputs, fill_padding, make_inputs
from tolerances import assert_results_close

DIFFERENTIABLE = ("x", "w", "r", "b", "initial_h")


def _run(inputs, cotangents, *, target, settings, wanted):
    def outputs(differentiated):
        y, y_h = target.gru(*inputs._replace(**differentiated), **dict(settings))
        return [out for out, c in zip((y, y_h), cotangents, strict=True) if c is not None], (y, y_h)

    _, pullback, results = jax.vjp(outputs, {name: getattr(inputs, name) for name in wanted}, has_aux=True)
    (gradients,) = pullback([c for c in cotangents if c is not None])
    return *results, gradients


_STATIC = ("target", "settings", "wanted")
_jitted = jax.jit(_run, static_argnames=_STATIC)
# As users' programs are compiled, whatever conftest.py set for the suite.
_OPTIMISED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
_jitted_optimised = jax.jit(_run, static_argnames=_STATIC, compiler_options=_OPTIMISED)


def values_and_gradients(
    target: Any,
    inputs: Inputs,
    cotangents: Cotangents,
    settings: dict[str, Any],
    wanted: Sequence[str] | None = None,
    *,
    optimised: bool = False,
) -> tuple[np.ndarray, np.ndarray, Inputs]:
    """`(y, y_h, gradients)` as NumPy arrays; a gradient that is not `wanted` is None. All are, where nothing is said.

    A result whose cotangent is None takes no part in the differentiation.
    """
    if wanted is None:
        wanted = [name for name in DIFFERENTIABLE if getattr(inputs, name) is not None]
    inputs, cotangents = target.put((inputs, cotangents))
    run = _jitted_optimised if optimised else _jitted
    y, y_h, gradients = run(inputs, cotangents, target=target, settings=tuple(settings.items()), wanted=tuple(wanted))
    absent = dict.fromkeys(Inputs._fields)
    return np.asarray(y), np.asarray(y_h), Inputs(**{**absent, **jax.tree.map(np.asarray, gradients)})


def check(target: Any, case: Case, dtype: str, *, optimised: bool = False) -> None:
    """Values and all gradients of a case against the reference; the padding of x holds NaN, which must not show."""
    inputs, cotangents = make_inputs(case, dtype)
    padded = fill_padding(inputs, np.nan)
    actual = values_and_gradients(target, padded, cotangents, case.settings, optimised=optimised)
    expected = references.values_and_gradients(inputs, cotangents, **case.settings)
    assert_results_close(actual, expected, dtype=dtype, terms=case.terms)
