"""`jaxgrad.nn.haiku.dynamic_unroll`: Haiku's `dynamic_unroll` of a `GRU`, on `jaxgrad.gru`."""

from __future__ import annotations

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from jaxgrad._src.convert.haiku_gru import from_parameters
from jaxgrad._src.core import checks
from jaxgrad._src.nn.rows import run_rows

_NAME = "jaxgrad.nn.haiku.dynamic_unroll"


def dynamic_unroll(
    core: Any,
    input_sequence: Any,
    initial_state: jax.Array,
    time_major: bool = True,
    reverse: bool = False,
    return_all_states: bool = False,
    unroll: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """`hk.dynamic_unroll` of an `hk.GRU` or an `hk.ResetCore` of one, with `jaxgrad.gru` in place of a scan.

    Arguments, parameters and results are those of `hk.dynamic_unroll`, and so are the initial values of the parameters
    and the policies of `hk.mixed_precision`: checkpoints fit both ways. A step of a rollout calls the core itself.

    Args:
      core: an `hk.GRU`, or an `hk.ResetCore` of one.
      input_sequence: [T, B, I], or [B, T, I] with `time_major=False`, or [T, I] without a batch. For a `ResetCore` a
        pair of the inputs and the resets [T, B], [B, T] or [T], bools, or numbers, as in `jaxgrad.gru`: where they are
        true, zeros replace the state before that step.
      initial_state: [B, H], or [H] without a batch.
      time_major: whether the steps come before the batch.
      reverse: whether the steps are taken from the last to the first.
      return_all_states: whether the states after all steps are returned in place of the last.
      unroll: has no effect.

    Returns:
      `(output_sequence, state)`: the states after each step, and the state after the step taken last, or with
      `return_all_states` the states after each step.

    Raises:
      TypeError: core is not an `hk.GRU` or an `hk.ResetCore` of one, or an array has an unsupported dtype.
      ValueError: a shape does not fit.

    Examples:
      >>> import haiku as hk
      >>> from jaxgrad.nn.haiku import dynamic_unroll
      >>> def run(x):
      ...   core = hk.GRU(5)
      ...   return dynamic_unroll(core, x, core.initial_state(4))
      >>> transformed = hk.without_apply_rng(hk.transform(run))
      >>> x = jnp.ones((10, 4, 3))
      >>> params = transformed.init(jax.random.key(0), x)
      >>> outputs, state = transformed.apply(params, x)
      >>> outputs.shape, state.shape
      ((10, 4, 5), (4, 5))
    """
    time_major = checks.check_flag(_NAME, "time_major", time_major)
    reverse = checks.check_flag(_NAME, "reverse", reverse)
    inputs, reset = input_sequence, None
    cell: Any = core
    if type(core) is hk.ResetCore:
        (inputs, reset), cell = input_sequence, core.core
        reset = checks.as_mask(_NAME, "the resets in input_sequence", reset)
    if not isinstance(cell, hk.GRU) or type(cell).__call__ is not hk.GRU.__call__:
        name = type(core).__name__ if cell is core else f"a ResetCore of {type(cell).__name__}"
        raise TypeError(f"{_NAME}: core must be an hk.GRU or an hk.ResetCore of one, got {name}; use hk.dynamic_unroll")
    inputs = checks.as_array(_NAME, "input_sequence", inputs)
    state = checks.as_array(_NAME, "initial_state", initial_state)
    if inputs.ndim not in (2, 3):
        raise ValueError(f"{_NAME}: input_sequence must have rank 2 or 3, got rank {inputs.ndim}, {inputs.shape}")
    if not time_major and inputs.ndim == 2:
        raise ValueError(f"{_NAME}: time_major must be True for an input_sequence without a batch, got False")
    if not time_major:
        inputs, reset = jnp.swapaxes(inputs, 0, 1), None if reset is None else jnp.swapaxes(reset, 0, 1)
    if reset is not None:
        checks.check_shape(
            _NAME, "the resets in input_sequence", reset, ("T", "B")[: inputs.ndim - 1], inputs.shape[:-1]
        )
    checks.check_shape(
        _NAME, "initial_state", state, ("B", "H")[-state.ndim :], (*inputs.shape[1:-1], cell.hidden_size)
    )

    def run(next_method: Any, args: Any, kwargs: Any, context: hk.MethodContext) -> Any:
        """Takes the place of the cell's step, inside its name scope and its policy, and runs all steps."""
        if context.module is not cell or context.method_name != "__call__":
            return next_method(*args, **kwargs)
        inputs, state = args
        return _all_steps(cell, inputs, state, reset, reverse)

    with hk.intercept_methods(run):
        outputs, state = cell(inputs, state)
    if not time_major:
        outputs = jnp.swapaxes(outputs, 0, 1)
    return outputs, outputs if return_all_states else state


def _all_steps(cell: Any, inputs: jax.Array, state: jax.Array, reset: Any, reverse: bool) -> Any:
    """`(outputs [T, *batch, H], last state [*batch, H])`. The parameters are made as `hk.GRU.__call__` makes them."""
    checks.check_promotable(_NAME, input_sequence=inputs, initial_state=state)  # after the policy has cast them
    I, H, dtype = inputs.shape[-1], cell.hidden_size, inputs.dtype  # noqa: E741
    w_i = hk.get_parameter("w_i", [I, 3 * H], dtype, init=cell.w_i_init)
    w_h = hk.get_parameter("w_h", [H, 3 * H], dtype, init=cell.w_h_init)
    b = hk.get_parameter("b", [3 * H], dtype, init=cell.b_init)
    common = jnp.result_type(inputs, w_i, w_h, b)
    last, states = run_rows(from_parameters(w_i, w_h, b), inputs, state, reset, reverse, common)
    return states.astype(state.dtype), last.astype(state.dtype)
