"""Whether a gain is to be expected from the calls that jaxgrad moved from XLA's code."""

from __future__ import annotations

from collections.abc import Sequence

from jaxgrad._src.accelerate.calls import Call, Convolution, total_flops

_SMALL_SHARE = 0.05  # of the arithmetic: about the noise between two timings of a step
_UNCERTAIN = "a gain is uncertain: implementation= forces what runs, and no measurement selected it"


def expectation(calls: Sequence[Call], share: float | None) -> str:
    """Returns whether a gain is to be expected, and why.

    Args:
      calls: the calls of the program.
      share: the part of the arithmetic that was moved; None if it is unknown or there is none.
    """
    moved = [call for call in calls if call.moved]
    if not calls:
        return "no gain is to be expected: the program has no convolution or pooling, and no other op of jaxgrad"
    if any(" raises ValueError " in call.reason for call in calls):
        return "no gain is to be expected: the program raises ValueError on this platform"
    if not moved:
        return "no gain is to be expected: every call runs as without jaxgrad"
    if all(call.moved == "forced" for call in moved):
        return _UNCERTAIN
    if share is None and any(call.total_flops != 0 for call in moved):
        return "a gain is possible: the share of the calls that run on kernels is unknown"
    if share is not None and share >= _SMALL_SHARE:
        flops = total_flops(call.total_flops for call in moved) or 0
        forced = total_flops(call.total_flops for call in moved if call.moved == "forced") or 0
        if share * (flops - forced) < _SMALL_SHARE * flops:
            return _UNCERTAIN
        return "a gain is to be expected: in measurements, such calls were faster than on XLA; time the step to see it"
    if any(call.op == "gru" or (isinstance(call, Convolution) and call.groups > 1) for call in moved):
        return "a gain is possible: XLA can take far longer for GRUs, and for groups, than the arithmetic suggests"
    if any(call.op.endswith(("_norm", "_pool")) for call in moved):
        return "a small gain is possible: normalization and pooling have no arithmetic to count, but take time"
    return "no gain is to be expected: the share is too small"
