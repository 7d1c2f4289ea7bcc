"""The backends that the tests run on: one implementation on one platform each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax

import jaxgrad


@dataclasses.dataclass(frozen=True)
class Backend:
    """One implementation on one platform; None stands for the implementations that jaxgrad selects."""

    implementation: str | None
    platform: str

    @property
    def device(self) -> jax.Device:
        return jax.devices(self.platform)[0]

    @property
    def gru(self) -> Callable[..., tuple[jax.Array, jax.Array]]:
        return partial(gru, implementation=self.implementation)

    @property
    def widest(self) -> str:
        """The widest dtype that the implementation has for the GRU and for norms."""
        return "float32" if self.implementation == "cuda" else "float64"

    def atol(self, of_float64: float) -> float:
        """The tolerance of a test that runs in the widest dtype, from that for float64."""
        return of_float64 if self.widest == "float64" else 1e-4

    def put(self, arrays: Any) -> Any:
        """The arrays of a tree on the backend's device, where JAX then runs every computation on them."""
        return jax.device_put(arrays, self.device)

    def __str__(self) -> str:
        return f"{self.implementation or 'selected'}_on_{self.platform}"


def gru(x, w, r, b=None, sequence_lens=None, initial_h=None, reset=None, reset_h=None, **settings):
    """`jaxgrad.gru` with all arrays as positional arguments, in the order of `gru_cases.Inputs`."""
    return jaxgrad.gru(x, w, r, b, sequence_lens, initial_h, reset=reset, reset_h=reset_h, **settings)


@contextmanager
def float64_on_cpu() -> Iterator[None]:
    """JAX's 64-bit types and the CPU, for references."""
    with jax.default_device(jax.devices("cpu")[0]), jax.enable_x64(True):
        yield


CPU_KERNEL, ONEDNN = Backend("cpu", "cpu"), Backend("onednn", "cpu")
XLA, XLA_ON_GPU = Backend("xla", "cpu"), Backend("xla", "gpu")
SELECTED = (Backend(None, "cpu"), Backend(None, "gpu"))
CUDNN, CUDA = Backend("cudnn", "gpu"), Backend("cuda", "gpu")

# The default backends of a test; a test module that needs others defines BACKENDS.
EVERY_OP = (CPU_KERNEL, XLA, XLA_ON_GPU)
BATCH_NORM = (*EVERY_OP, CUDNN)
CONVOLUTION = (ONEDNN, XLA, XLA_ON_GPU, CUDNN)
GRU = (*EVERY_OP, CUDA)

# Test modules, relative to tests/, whose tests of XLA on a CPU are marked `thorough`: XLA takes seconds to compile each
# scan of the GRU, and an XLA convolution is nearly the same program as `jax.lax`.
THOROUGH_ON_XLA = (
    "norm/test_derivatives",
    "norm/test_group_and_layer_norm_transforms",
    "norm/test_named_vmap",
    "norm/test_runtime",
    "norm/test_transforms",
    "norm/test_vmap",
    "conv/test_conv_transpose_torch",
    "conv/test_derivatives",
    "conv/test_dtypes",
    "conv/test_gradient_subsets",
    "conv/test_runtime",
    "conv/test_vmap",
    "gru/test_clip",
    "gru/test_derivatives",
    "gru/test_gradient_subsets",
    "gru/test_lengths",
    "gru/test_nonfinite",
    "gru/test_random_cases",
    "gru/test_remat",
    "gru/test_runtime",
    "gru/test_torch",
    "gru/test_vmap",
)
