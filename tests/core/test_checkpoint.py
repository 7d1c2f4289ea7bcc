"""`jax.checkpoint` with every stock policy: the gradients, and the number of forward passes."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import checkpoint_policies
from op_cases import OPS, loss, op_case
from thorough import one_in

pytestmark = pytest.mark.jax_version

NAMES = [f"jaxgrad.{op}" for op in OPS]
MEMORY = {"offload_src": "device", "offload_dst": "pinned_host"}
_ONLY_OURS = checkpoint_policies.save_only_these_names(*NAMES)

# policy, and whether it saves the residuals of the backward pass
POLICIES = {
    "none": (None, False),
    "nothing_saveable": (checkpoint_policies.nothing_saveable, False),
    "dots_saveable": (checkpoint_policies.dots_saveable, False),
    "dots_with_no_batch_dims_saveable": (checkpoint_policies.dots_with_no_batch_dims_saveable, False),
    "offload_dot_with_no_batch_dims": (checkpoint_policies.offload_dot_with_no_batch_dims(*MEMORY.values()), False),
    "save_any_names_but_these": (checkpoint_policies.save_any_names_but_these(*NAMES), False),
    "everything_saveable": (checkpoint_policies.everything_saveable, True),
    "save_anything_except_these_names": (checkpoint_policies.save_anything_except_these_names("another"), True),
    "save_only_these_names": (_ONLY_OURS, True),
    "save_from_both_policies": (
        checkpoint_policies.save_from_both_policies(checkpoint_policies.dots_saveable, _ONLY_OURS),
        True,
    ),
    "save_and_offload_only_these_names": (
        checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=NAMES, names_which_can_be_offloaded=[], **MEMORY
        ),
        True,
    ),
}


def _layer(case, *arrays):
    return loss(case.call("cpu")(jnp.tanh(arrays[0]), *arrays[1:]))


def _compiled(function, arrays):
    """The number of calls of each kernel in the compiled gradient, and the results.

    XLA on the CPU merges equal calls, which would hide a recomputation; the compiler option prevents this.
    """
    gradient = jax.jit(jax.value_and_grad(function, argnums=tuple(range(len(arrays)))))
    compiled = gradient.lower(*arrays).compile(compiler_options={"xla_disable_hlo_passes": "cse"})
    return Counter(re.findall(r'custom_call_target="(jaxgrad_\w+)"', compiled.as_text())), compiled(*arrays)


@cache
def _without_checkpoint(op: str) -> Any:
    case = op_case(op)
    return _compiled(partial(_layer, case), case.arrays)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("policy", one_in(2, POLICIES))
def test_forward_pass_is_recomputed_only_without_saved_results(op, policy):
    case, (policy, keeps) = op_case(op), POLICIES[policy]
    plain_calls, expected = _without_checkpoint(op)
    calls, found = _compiled(jax.checkpoint(partial(_layer, case), policy=policy), case.arrays)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)
    assert plain_calls[case.kernel] == 1
    if keeps:
        assert calls == plain_calls
    else:
        assert calls[case.kernel] == 2


def test_every_stock_policy_is_tested():
    stock = {name for name in dir(checkpoint_policies) if not name.startswith("_")}
    assert stock - set(POLICIES) <= {"checkpoint_dots", "checkpoint_dots_with_no_batch_dims"}  # aliases
