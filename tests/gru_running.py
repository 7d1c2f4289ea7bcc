"""Runs the GRU and its gradients in one compiled call, and compares with the float64 reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gru_references
import jax
import numpy as np
import pytest
from gru_cases import Case, Cotangents, Inputs, fill_padding, make_inputs
from tolerances import assert_results_close

DIFFERENTIABLE = ("x", "w", "r", "b", "initial_h", "reset_h")


def _run(inputs, cotangents, *, backend, settings, requested):
    def outputs(differentiated):
        y, y_h = backend.gru(*inputs._replace(**differentiated), **dict(settings))
        return [out for out, c in zip((y, y_h), cotangents, strict=True) if c is not None], (y, y_h)

    _, pullback, results = jax.vjp(outputs, {name: getattr(inputs, name) for name in requested}, has_aux=True)
    (gradients,) = pullback([c for c in cotangents if c is not None])
    return *results, gradients


_STATIC = ("backend", "settings", "requested")
_jitted = jax.jit(_run, static_argnames=_STATIC)
# The optimizations of a user's program, which conftest.py disables for the suite.
_OPTIMIZED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
_jitted_optimized = jax.jit(_run, static_argnames=_STATIC, compiler_options=_OPTIMIZED)


def values_and_gradients(
    backend: Any,
    inputs: Inputs,
    cotangents: Cotangents,
    settings: dict[str, Any],
    requested: Sequence[str] | None = None,
    *,
    optimized: bool = False,
) -> tuple[np.ndarray, np.ndarray, Inputs]:
    """`(y, y_h, gradients)` as NumPy arrays. `requested` names the differentiated inputs; None stands for all.

    The gradients of the other inputs are None. A result whose cotangent is None is not differentiated. Skips the test
    if the backend does not compute the dtype of the inputs.
    """
    if inputs.x.dtype == np.float64 and backend.widest != "float64":
        pytest.skip("the kernels do not compute float64")
    if requested is None:
        requested = [name for name in DIFFERENTIABLE if getattr(inputs, name) is not None]
    inputs, cotangents = backend.put((inputs, cotangents))
    run = _jitted_optimized if optimized else _jitted
    y, y_h, gradients = run(
        inputs, cotangents, backend=backend, settings=tuple(settings.items()), requested=tuple(requested)
    )
    absent = dict.fromkeys(Inputs._fields)
    return np.asarray(y), np.asarray(y_h), Inputs(**{**absent, **jax.tree.map(np.asarray, gradients)})


def check(backend: Any, case: Case, dtype: str, *, optimized: bool = False) -> None:
    """Compares values and all gradients of a case with the reference. The padding of x is NaN."""
    inputs, cotangents = make_inputs(case, dtype)
    padded = fill_padding(inputs, np.nan)
    actual = values_and_gradients(backend, padded, cotangents, case.settings, optimized=optimized)
    expected = gru_references.values_and_gradients(inputs, cotangents, **case.settings)
    assert_results_close(actual, expected, dtype=dtype, terms=case.terms, backend=backend)
