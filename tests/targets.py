"""The implementations that the op's tests run on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

import jaxgrad


@dataclasses.dataclass(frozen=True)
class Target:
    """One implementation on one platform."""

    implementation: str
    platform: str

    @property
    def device(self) -> jax.Device:
        return jax.devices(self.platform)[0]

    @property
    def gru(self) -> Callable[..., tuple[jax.Array, jax.Array]]:
        return partial(jaxgrad.gru, implementation=self.implementation)

    def put(self, arrays: Any) -> Any:
        """The arrays of a tree on the target's device, where every computation on them then runs."""
        return jax.device_put(arrays, self.device)

    def __str__(self) -> str:
        return f"{self.implementation}_on_{self.platform}"


CPU_KERNEL, XLA, XLA_ON_GPU = Target("cpu", "cpu"), Target("xla", "cpu"), Target("xla", "gpu")
CUDNN, CUDA = Target("cudnn", "gpu"), Target("cuda", "gpu")

# What the tests of each op run on: a test module names its own as TARGETS.
EVERY_OP = (CPU_KERNEL, XLA, XLA_ON_GPU)
CONVOLUTION = BATCH_NORM = (*EVERY_OP, CUDNN)

# The modules whose tests of plain XLA on a CPU are thorough: the GRU's compile scans, which takes seconds each, and
# convolution's come to what jax.lax does.
THOROUGH_ON_XLA = (
    "test_batch_norm_transforms",
    "test_conv_derivatives",
    "test_conv_dtypes",
    "test_conv_runtime",
    "test_conv_transpose_torch",
    "test_conv_vmap",
    "test_conv_wanted",
    "test_gru_clip",
    "test_gru_derivatives",
    "test_gru_lengths",
    "test_gru_nan",
    "test_gru_runtime",
    "test_gru_sweep",
    "test_gru_torch",
    "test_gru_vmap",
    "test_gru_wanted",
)
