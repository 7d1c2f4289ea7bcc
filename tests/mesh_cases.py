"""Arrays, and how a mesh splits them, that the mesh tests of several folders share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

NHWC = ("NHWC", "HWIO", "NHWC")
BATCH_NORM_SPECS = (P("d"), P(), P(), P("d"))  # x, scale, bias, residual


def batch_norm_args() -> tuple[jax.Array, ...]:
    """The means of the rows differ widely: the statistics of one device are far from those of the batch."""
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (16, 6, 8, 4)) + jnp.arange(16.0)[:, None, None, None]
    scale, bias = jax.random.normal(keys[1], (2, 4)) + 1
    return x, scale, bias, jax.random.normal(keys[2], x.shape)
