"""The interface of the backends of pooling.

x has one axis or more of the batch, then the spatial axes and the channels, in the order that `Window` says.
"""

from __future__ import annotations

import jax

from jaxgrad._src.choice.op import Backend
from jaxgrad._src.pool.params import PoolParams

MAX_PASSES = ("forward", "input_gradient", "tangent")
AVG_PASSES = ("forward", "input_gradient")


class PoolBackend(Backend):
    """Kernels of `max_pool` and `avg_pool`. A call is described by a `PoolProblem`.

    The derivatives are linear, and each is the transpose of another pass: of `max_tangent` is `max_input_gradient`, of
    `sum_forward` is `sum_input_gradient`. Those of the maximum select the element of a window as XLA's
    `select_and_scatter` does; see `pool.xla`.
    """

    def max_forward(self, params: PoolParams, x: jax.Array) -> jax.Array:
        """Returns y, the maximum of each window."""
        raise NotImplementedError

    def max_input_gradient(self, params: PoolParams, x: jax.Array, dy: jax.Array) -> jax.Array:
        """Returns dx: each element is the sum of dy over the windows that select it."""
        raise NotImplementedError

    def max_tangent(self, params: PoolParams, x: jax.Array, dx: jax.Array) -> jax.Array:
        """Returns the tangent of y along dx: the element of dx that each window selects."""
        raise NotImplementedError

    def sum_forward(self, params: PoolParams, x: jax.Array) -> jax.Array:
        """Returns y, the sum of each window, divided. Padding is zero."""
        raise NotImplementedError

    def sum_input_gradient(self, params: PoolParams, dy: jax.Array) -> jax.Array:
        """Returns dx: each element is the sum of dy over the windows that it is in, divided."""
        raise NotImplementedError
