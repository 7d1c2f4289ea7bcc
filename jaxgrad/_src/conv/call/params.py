"""The static parameters of the convolution passes."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxgrad._src.choice.candidates import Candidates
from jaxgrad._src.choice.settings import Settings
from jaxgrad._src.conv.call.geometry import ConvGeometry
from jaxgrad._src.conv.call.problem import ConvProblem
from jaxgrad._src.core.precision import precision_flags


@dataclasses.dataclass(frozen=True)
class ConvParams:
    """The static parameters of one call and of its gradients.

    Attributes:
      geometry: the geometry of the forward convolution.
      precision: as in `jax.lax.conv_general_dilated`.
      candidates: the candidates by pass, as pairs.
      settings: the settings in force when the call was traced.
      batched: whether each array has an axis of independent problems before the axes of the geometry, as `vmap` makes.
    """

    geometry: ConvGeometry
    precision: Any
    candidates: tuple[tuple[str, Candidates], ...]
    settings: Settings
    batched: bool = False

    @property
    def identity(self) -> ConvParams:
        """The parameters that programs depend on: not the directory in which plans are kept."""
        return dataclasses.replace(self, settings=dataclasses.replace(self.settings, plan_cache_dir=None))

    def in_groups(self, count: int) -> ConvParams:
        """The parameters of one convolution whose groups are `count` independent problems."""
        return dataclasses.replace(self, geometry=self.geometry.in_groups(count), batched=False)


@dataclasses.dataclass(frozen=True)
class ConvCall:
    """A call as the backends are asked about it.

    Attributes:
      problem: the convolution, which for a transposed convolution is the one that is transposed.
      precision, settings: as in `ConvParams`.
      has_bias: whether a bias is added to the result; in the weight gradient, whether its gradient is needed.
      relu: whether relu is applied to the result.
      transposed: whether the call is a transposed convolution, whose value is the pass "input_gradient".
    """

    problem: ConvProblem
    precision: Any
    settings: Settings
    has_bias: bool = False
    relu: bool = False
    transposed: bool = False

    def text(self, pass_name: str, platform: str) -> str:
        """The text of a pass in a tuning."""
        p = self.problem
        flags = precision_flags(p.dtype, self.precision)
        flags += ["bias"] * (self.fused_bias and pass_name != "input_gradient")
        flags += ["relu"] * (self.fused_relu and pass_name == "forward")
        return " ".join(["conv", pass_name, p.text(), *flags, *self.settings.texts(platform)])

    @property
    def fused_bias(self) -> bool:
        """Whether a kernel may add the bias: XLA adds the bias of a transposed convolution."""
        return self.has_bias and not self.transposed

    @property
    def fused_relu(self) -> bool:
        """Whether a kernel may apply relu: XLA applies the relu of a transposed convolution."""
        return self.relu and not self.transposed
