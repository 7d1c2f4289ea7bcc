"""The result of `jaxgrad.report`."""

from __future__ import annotations

import dataclasses
from collections import Counter

from jaxgrad._src.accelerate import tables
from jaxgrad._src.accelerate.calls import Call, Convolution, Layer, layers_of, total_flops
from jaxgrad._src.accelerate.expectation import expectation


@dataclasses.dataclass(frozen=True)
class Report:
    """The calls of a program. `print` shows its layers, and `dataclasses.asdict` returns a dictionary.

    Attributes:
      platform: "cpu" or "gpu".
      calls: the passes of convolutions, poolings, batch normalizations and GRUs, in the order of the program.
        Convolutions and poolings are listed whether `jax.lax` or jaxgrad computes them; batch normalizations and GRUs
        only as ops of jaxgrad.
      product_flops: the operations of the program's other matrix products. None for symbolic shapes.
      convolutions: the convolutions among `calls`.
    """

    platform: str
    calls: tuple[Call, ...]
    product_flops: int | None = 0
    convolutions: tuple[Convolution, ...] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        convolutions = tuple(call for call in self.calls if isinstance(call, Convolution))
        object.__setattr__(self, "convolutions", convolutions)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers, in the order of the program. The gradients of a layer belong to it."""
        return layers_of(self.calls)

    @property
    def counts(self) -> dict[str, int]:
        """The number of calls by implementation. The body of a loop counts once."""
        found: Counter[str] = Counter()
        for call in self.calls:
            found[call.implementation] += call.count
        return dict(found)

    @property
    def flops(self) -> int | None:
        """The operations of all calls. The body of a `scan` counts as often as it runs, that of another loop once.

        None for symbolic shapes.
        """
        return total_flops(call.total_flops for call in self.calls)

    @property
    def share(self) -> float | None:
        """The part of the arithmetic that jaxgrad moved from XLA's code to a kernel or a faster form.

        The arithmetic is that of convolutions, GRUs and matrix products. None if there is none, or for symbolic shapes.
        """
        moved, total = self._moved_flops, self._all_flops
        return None if moved is None or not total else moved / total

    @property
    def summary(self) -> str:
        """One sentence: the share of the arithmetic that jaxgrad moved, and whether a gain is to be expected."""
        if self.share is None:
            is_known = self._all_flops is not None
            share = "no arithmetic to count" if is_known else "the arithmetic is unknown: shapes are symbolic"
        else:
            part, whole = tables.in_millions(self._moved_flops), tables.in_millions(self._all_flops)
            share = f"{100 * self.share:.3g} % of the arithmetic ({part} of {whole} MFLOP) runs on jaxgrad's kernels"
            if any(call.moved and call.implementation == "xla" for call in self.calls):
                share += " or in a faster form on XLA"
        return f"{share}; {expectation(self.calls, self.share)}"

    def details(self) -> str:
        """A table of all calls, with their shapes."""
        return tables.details(self.calls)

    def __str__(self) -> str:
        return tables.with_totals(self.layers, self.counts, self.platform, self.summary)

    @property
    def _moved_flops(self) -> int | None:
        return total_flops(call.total_flops for call in self.calls if call.moved)

    @property
    def _all_flops(self) -> int | None:
        return total_flops((self.flops, self.product_flops))
