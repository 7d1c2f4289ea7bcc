"""The interface of the backends of pooling.

x has one axis or more of the batch, then the spatial axes and the channels, in the order that `Window` says.
"""

from __future__ import annotations

import jax

from jaxgrad._src.choice.op import Backend
from jaxgrad._src.pool.params import Window

PASSES = ("forward", "input_gradient", "tangent")


class PoolBackend(Backend):
    """Kernels of `max_pool`. A call is described by a `PoolProblem`.

    The second and third pass are linear in their second operand, and each is the transpose of the other. Both select
    the element of a window as XLA's `select_and_scatter` does; see `pool.xla`.
    """

    def forward(self, window: Window, x: jax.Array) -> jax.Array:
        """Returns y, the maximum of each window."""
        raise NotImplementedError

    def input_gradient(self, window: Window, x: jax.Array, dy: jax.Array) -> jax.Array:
        """Returns dx: each element is the sum of dy over the windows that select it."""
        raise NotImplementedError

    def tangent(self, window: Window, x: jax.Array, dx: jax.Array) -> jax.Array:
        """Returns the tangent of y along dx: the element of dx that each window selects."""
        raise NotImplementedError
