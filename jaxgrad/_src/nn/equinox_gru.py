"""`jaxgrad.nn.equinox.scan_gru`: a `lax.scan` over an equinox `GRUCell`, on `jaxgrad.gru`."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp

from jaxgrad._src.convert.equinox_gru import read_cell
from jaxgrad._src.core import checks
from jaxgrad._src.nn.rows import run_rows

_NAME = "jaxgrad.nn.equinox.scan_gru"


@jax.named_scope(_NAME)
def scan_gru(
    cell: eqx.nn.GRUCell,
    init: jax.typing.ArrayLike,
    xs: jax.typing.ArrayLike,
    *,
    reverse: bool = False,
    reset: jax.typing.ArrayLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Runs an `eqx.nn.GRUCell` over a sequence with `jaxgrad.gru`: `jax.lax.scan` of a function that calls the cell.

    It replaces this scan, with the same results:

      step = lambda h, x: 2 * (cell(x, h),)
      last, states = jax.lax.scan(step, init, xs)

    Under `jax.vmap` over sequences, which is equinox's way of batching, all sequences run in one call. A step of a
    rollout calls the cell itself.

    Args:
      cell: the cell.
      init: [*batch, H], the state before the first step.
      xs: [T, *batch, I], the inputs. With batch dimensions, the results are those of the cell under `jax.vmap`.
      reverse: whether the steps are taken from the last to the first, as in `jax.lax.scan`.
      reset: [T, *batch], bools, or numbers, as in `jaxgrad.gru`. Where it is true, zeros replace the state before that
        step, as at the first step of an episode. None for no resets.

    Returns:
      `(last, states)`:

      last: [*batch, H], the state after the step taken last.
      states: [T, *batch, H], the state after each step.

    Raises:
      TypeError: cell is not an `eqx.nn.GRUCell`, or an array has an unsupported dtype.
      ValueError: a shape does not fit.

    Examples:
      >>> import equinox as eqx
      >>> from jaxgrad.nn.equinox import scan_gru
      >>> cell = eqx.nn.GRUCell(3, 5, key=jax.random.key(0))
      >>> xs = jnp.ones((4, 10, 3))
      >>> last, states = jax.vmap(lambda xs: scan_gru(cell, jnp.zeros(5), xs))(xs)
      >>> last.shape, states.shape
      ((4, 5), (4, 10, 5))
    """
    if not isinstance(cell, eqx.nn.GRUCell) or type(cell).__call__ is not eqx.nn.GRUCell.__call__:
        raise TypeError(f"{_NAME}: cell must be an equinox.nn.GRUCell, got {type(cell).__name__}; use jax.lax.scan")
    reverse = checks.check_flag(_NAME, "reverse", reverse)
    weights = read_cell(cell)
    I, H = weights.w.shape[2], weights.r.shape[2]  # noqa: E741
    xs, init = checks.as_array(_NAME, "xs", xs), checks.as_array(_NAME, "init", init)
    if xs.ndim < 2 or xs.shape[-1] != I:
        raise ValueError(f"{_NAME}: xs must have the shape [T, *batch, I] with I = {I}, got {xs.shape}")
    for array in jax.tree.leaves(weights):
        checks.check_promotable(_NAME, xs=xs, init=init, cell=array)
    T, *batch = xs.shape[:-1]
    checks.check_shape(_NAME, "init", init, ("*batch", "H"), (*batch, H))
    if reset is not None:
        reset = checks.as_mask(_NAME, "reset", reset)
        checks.check_shape(_NAME, "reset", reset, ("T", "*batch"), (T, *batch))
    return run_rows(weights, xs, init, reset, reverse, jnp.result_type(xs, init, *jax.tree.leaves(weights)))
