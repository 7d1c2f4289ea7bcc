"""The interface of the backends of the convolutions."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax

from jaxgrad._src.choice.op import Backend
from jaxgrad._src.choice.table import Row, preference, this_device
from jaxgrad._src.conv.call.features import ConvFeatures
from jaxgrad._src.conv.call.params import ConvCall, ConvParams
from jaxgrad._src.conv.call.problem import ConvProblem
from jaxgrad._src.core.jax_internals import cleared_lru_cache

PASSES = ("forward", "input_gradient", "weight_gradient")

# The two operands and the result of each pass, as profiles name them.
_ARRAYS = {"forward": ("x", "w", "y"), "input_gradient": ("dy", "w", "dx"), "weight_gradient": ("x", "dy", "dw")}


def named_arrays(pass_name: str, *arrays: Any) -> dict[str, Any]:
    """Returns the two operands and the result of a pass by name, for `ffi_call`."""
    return dict(zip(_ARRAYS[pass_name], arrays, strict=True))


@cleared_lru_cache(4096)
def _row_of(
    _: str, pass_name: str, platform: str, problem: ConvProblem, relu: bool, among: tuple[str, ...], resized: bool
) -> Row | None:
    """The row of a problem. Kept, also by the device: outside `jax.jit`, a call asks each time."""
    return preference("conv", pass_name, platform, ConvFeatures(problem, platform, relu=relu), among, resized=resized)


class ConvBackend(Backend):
    """Kernels for the passes of a convolution. A subclass implements the passes that `supports` does not reject.

    The arrays have the layouts of `params.geometry`. w and dw have a reversed window where
    `params.geometry.window_reversed` is set.

    Args:
      *siblings: the later backends of the platform. The tables of preferences compare this one with them and with XLA.

    Attributes:
      takes_independent_problems: whether the kernels take the axis of independent problems that `vmap` makes
        (`params.batched`). Otherwise the problems become groups of one convolution.
    """

    takes_independent_problems: ClassVar[bool] = False

    def __init__(self, *siblings: Backend) -> None:
        self._siblings = siblings

    def row(self, pass_name: str, call: ConvCall, *, resized: bool = False) -> Row | None:
        siblings = (each.implementation for each in self._siblings if not each.unavailable())
        among = self.implementation, *siblings, "xla"
        relu = call.fused_relu and pass_name == "forward"
        return _row_of(this_device(self.platform), pass_name, self.platform, call.problem, relu, among, resized)

    def supports_resized(self, pass_name: str, call: ConvCall) -> bool:
        if not self.takes_independent_problems:
            call = dataclasses.replace(call, problem=call.problem.in_groups())
        return self.reject(pass_name, call, forced=True) is None

    def forward(self, params: ConvParams, relu: bool, x: jax.Array, w: jax.Array, bias: jax.Array | None) -> jax.Array:
        """Returns y = conv(x, w) + bias, or the relu of it."""
        raise NotImplementedError

    def input_gradient(self, params: ConvParams, dy: jax.Array, w: jax.Array) -> jax.Array:
        """Returns dx."""
        raise NotImplementedError

    def weight_gradient(
        self, params: ConvParams, needs_bias_gradient: bool, x: jax.Array, dy: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns dw and, if needed, the bias gradient."""
        raise NotImplementedError
