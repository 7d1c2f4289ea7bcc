"""The passes of the GRU: jitted, batched and partitioned calls of the selected implementation.

The rows of a batch do not depend on each other: `vmap` folds a mapped axis into the batch, and a mesh may split it.
Where the weights are mapped too, `vmap` makes groups, which the kernels compute in one call, and a mesh may split them.
The gradients of the weights are sums over the batch: where they are computed for each example of a mapped axis, the
examples are groups that share the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from jax import lax

from jaxgrad._src.choice.candidates import Candidates
from jaxgrad._src.choice.selection import supporting
from jaxgrad._src.core.jax_internals import cleared_lru_cache
from jaxgrad._src.gru import xla
from jaxgrad._src.gru.backends import BACKENDS
from jaxgrad._src.gru.params import GruParams, GruProblem
from jaxgrad._src.run.batching import fold_or_group
from jaxgrad._src.run.named_jit import named_jit
from jaxgrad._src.run.partitioning import Dims, PartitioningRule, dims, partitioned

_MAX_PASSES = 1024  # jitted passes of each kind that are kept, for different parameters

# The axis of the batch in each operand and result that has one.
_AXIS = {"x": 1, "sequence_lens": 0, "initial_h": 1, "reset": 1, "reset_h": 1, "y": 2, "y_h": 1, "gates": 2}
_RANK = {"x": 3, "weights": 3, "b": 2, "sequence_lens": 1, "reset": 2, "y": 4, "gates": 4}
_RANK |= {"initial_h": 3, "reset_h": 3, "y_h": 3}

# The dimensions that a mesh may split: the batch.
_NAMES = {name: dims(rank, **({"B": _AXIS[name]} if name in _AXIS else {})) for name, rank in _RANK.items()}

_FORWARD_OPERANDS = ("x", "weights", "weights", "b", "sequence_lens", "initial_h", "reset", "reset_h")
_BACKWARD_OPERANDS = (*(name for name in _FORWARD_OPERANDS if name != "b"), "y", "gates", "y", "y_h")
_GRADIENTS = ("x", "weights", "weights", "b", "initial_h", "reset_h")


@cleared_lru_cache(_MAX_PASSES)
def forward(params: GruParams, save_gates: bool) -> Callable[..., Any]:
    """Returns (x, w, r, b, sequence_lens, initial_h, reset, reset_h) -> (y, y_h, gates)."""
    kernels = {backend.implementation: partial(backend.forward, params, save_gates=save_gates) for backend in BACKENDS}
    rule = PartitioningRule(
        tuple(_NAMES[name] for name in _FORWARD_OPERANDS),
        (_NAMES["y"], _NAMES["y_h"], _NAMES["gates"] if save_gates else (None,)),
    )

    def candidates(x, w, r, *_):
        return candidates_of(params, "forward", params.problem(x, r))

    on_xla = partial(xla.forward, params, save_gates=save_gates)
    batched = fold_or_group(
        *_calls_and_groups(rule, candidates, kernels, on_xla),
        in_axes=tuple(map(_AXIS.get, _FORWARD_OPERANDS)),
        out_axes=(_AXIS["y"], _AXIS["y_h"], _AXIS["gates"] if save_gates else None),
    )
    return named_jit(batched, "gru_forward", params, save_gates)


@cleared_lru_cache(_MAX_PASSES)
def backward(params: GruParams, needs_grad: tuple[bool, ...]) -> Callable[..., Any]:
    """Returns a function of (x, w, r, sequence_lens, initial_h, reset, reset_h, y, gates, dy, dy_h).

    It returns the gradients of (x, w, r, b, initial_h, reset_h). A gradient that is not needed is None.
    """

    def as_tuple(pass_: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arrays: tuple(pass_(params, *arrays, needs_grad=needs_grad))

    kernels = {backend.implementation: as_tuple(backend.backward) for backend in BACKENDS}
    rule = PartitioningRule(
        tuple(_NAMES[name] for name in _BACKWARD_OPERANDS),
        tuple(_NAMES[name] if needed else None for name, needed in zip(_GRADIENTS, needs_grad, strict=True)),
        summed=("B",),
    )

    def candidates(x, w, r, *_):
        return candidates_of(params, "backward", params.problem(x, r))

    has_sums = any(needs_grad[1:4])  # the gradients of w, r and b are sums over the batch
    batched = fold_or_group(
        *_calls_and_groups(rule, candidates, kernels, as_tuple(xla.backward)),
        in_axes=tuple(map(_AXIS.get, _BACKWARD_OPERANDS)),
        out_axes=tuple(map(_AXIS.get, _GRADIENTS)),
        of_examples=_call_of_examples(rule, candidates, kernels, as_tuple(xla.backward)) if has_sums else None,
    )
    return named_jit(batched, "gru_backward", params, needs_grad)


def _calls_and_groups(
    rule: PartitioningRule,
    candidates: Callable[..., Candidates],
    kernels: Mapping[str, Callable[..., Any]],
    on_xla: Callable[..., Any],
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns a pass for one group, and one for arrays with a first axis of groups, which `kernels` take."""

    of_groups = PartitioningRule(
        tuple(map(_with_groups, rule.operands)), tuple(map(_with_groups, rule.results)), rule.summed
    )
    for_one = {name: _for_one_group(kernel) for name, kernel in kernels.items()}
    return (
        partitioned(rule, candidates, for_one, on_xla),
        partitioned(of_groups, candidates, kernels, jax.vmap(on_xla)),
    )


def _call_of_examples(
    rule: PartitioningRule,
    candidates: Callable[..., Candidates],
    kernels: Mapping[str, Callable[..., Any]],
    on_xla: Callable[..., Any],
) -> Callable[..., Any]:
    """Returns the backward pass for arrays with a first axis of examples, which w and r do not have."""
    shares = tuple(name == "weights" for name in _BACKWARD_OPERANDS)

    def of_kernel(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arrays: Any) -> Any:
            return kernel(
                *(lax.expand_dims(a, (0,)) if shared else a for a, shared in zip(arrays, shares, strict=True))
            )

        return call

    operands = (names if shared else _with_groups(names) for names, shared in zip(rule.operands, shares, strict=True))
    of_examples = PartitioningRule(tuple(operands), tuple(map(_with_groups, rule.results)), rule.summed)
    on_kernels = {name: of_kernel(kernel) for name, kernel in kernels.items()}
    in_axes = tuple(None if shared else 0 for shared in shares)
    return partitioned(of_examples, candidates, on_kernels, jax.vmap(on_xla, in_axes))


def _with_groups(names: Dims | None) -> Dims | None:
    return None if names is None else ("G", *names)


def _for_one_group(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arrays: Any) -> Any:
        one = jax.tree.map(lambda array: lax.expand_dims(array, (0,)), arrays)
        return jax.tree.map(lambda result: lax.squeeze(result, (0,)), kernel(*one))

    return call


def candidates_of(params: GruParams, pass_name: str, problem: GruProblem) -> Candidates:
    """Returns the candidates for the operands of a pass, whose batch `vmap` or a mesh may have changed."""
    candidates = params.forward_candidates if pass_name == "forward" else params.backward_candidates
    return supporting(candidates, BACKENDS, pass_name, problem)
