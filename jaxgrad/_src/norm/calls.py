"""A call of an op with checked arguments: selects an implementation, and calls the differentiable function."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxgrad._src.choice.op import Op
from jaxgrad._src.choice.selection import reject_symbolic_shapes, select
from jaxgrad._src.norm import autodiff, jvp
from jaxgrad._src.norm.params import NormParams
from jaxgrad._src.run import forward_mode
from jaxgrad._src.run.mesh_axes import pvary_to_match


def by_own_statistics(
    op: Op,
    implementation: str | None,
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    residual: jax.Array | None,
    **settings: Any,
) -> tuple[jax.Array, Any, Any]:
    """Returns `(y, mean, var)` of a call with the statistics of x. `settings` are fields of `NormParams`."""
    params = _params(op, implementation, x, residual=residual is not None, **settings)
    arrays = pvary_to_match(x, scale, bias, residual)
    return forward_mode.call(autodiff.training, jvp.TRAINING_RULES, params, *arrays)


def by_given_statistics(op: Op, implementation: str | None, *arrays: jax.Array, **settings: Any) -> jax.Array:
    """Returns y of a call with given statistics. The arrays are x, scale, bias, mean and var."""
    params = _params(op, implementation, arrays[0], frozen=True, activation=None, **settings)
    return forward_mode.call(autodiff.inference, jvp.INFERENCE_RULES, params, *pvary_to_match(*arrays))


def _params(op: Op, implementation: str | None, x: jax.Array, **settings: Any) -> NormParams:
    params = NormParams(op.name, **settings)
    problem = params.problem(jax.ShapeDtypeStruct((1, *x.shape), x.dtype))
    candidates = select(op, implementation, problem, reject_symbolic_shapes(x)).candidates
    return dataclasses.replace(
        params, forward_candidates=candidates["forward"], backward_candidates=candidates["backward"]
    )
