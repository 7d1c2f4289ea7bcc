"""Runs problems of the GRU as the groups of one call, under `vmap`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from gru_cases import Cotangents, Inputs
from gru_running import DIFFERENTIABLE


def _run(settings, backend, inputs, cotangents):
    def outputs(differentiated):
        return backend.gru(*inputs._replace(**differentiated), **settings)

    given = {name: getattr(inputs, name) for name in DIFFERENTIABLE if getattr(inputs, name) is not None}
    results, pullback = jax.vjp(outputs, given)
    (gradients,) = pullback(tuple(cotangents))
    return *results, Inputs(**{**dict.fromkeys(Inputs._fields), **gradients})


def values_and_gradients_of_groups(
    backend: Any, problems: Sequence[tuple[Inputs, Cotangents]], settings: dict[str, Any]
) -> list[tuple[np.ndarray, np.ndarray, Inputs]]:
    """`(y, y_h, gradients)` of each problem. All arrays of the problems are mapped, the weights too."""
    together = backend.put(jax.tree.map(lambda *arrays: np.stack(arrays), *problems))
    found = jax.tree.map(np.asarray, jax.jit(jax.vmap(partial(_run, settings, backend)))(*together))
    return [jax.tree.map(lambda array, i=i: array[i], found) for i in range(len(problems))]
