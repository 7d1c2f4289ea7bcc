"""The results of measurements."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jaxgrad._src.choice.environment import Environment
from jaxgrad._src.choice.explain import PassExplanation

JAXGRAD, XLA, PYTORCH = "jaxgrad", "XLA", "PyTorch"
_MARGIN = 1.05  # XLA is the better choice where jaxgrad takes longer by more
_STEADY = 1.25  # the upper quartile over the lower one, at most


@dataclasses.dataclass(frozen=True)
class PassResult:
    """One pass of a call.

    Attributes:
      explained: what it runs on in jaxgrad; several where it has several passes of the op.
      milliseconds: samples of one call, by contender.
      failed: why a contender has no times.
      difference: the largest ||a - b|| / ||b|| of an output of jaxgrad and of XLA, where both ran.
    """

    explained: tuple[PassExplanation, ...]
    milliseconds: Mapping[str, Sequence[float]]
    failed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    difference: float | None = None

    @property
    def implementation(self) -> str:
        """The implementations of the pass, such as "cpu" or "cudnn + xla"."""
        return " + ".join(dict.fromkeys(each.implementation for each in self.explained))

    def median(self, contender: str) -> float | None:
        return statistics.median(self.milliseconds[contender]) if contender in self.milliseconds else None

    def speedup(self, contender: str) -> float | None:
        return _ratio(self.median(contender), self.median(JAXGRAD))

    @property
    def is_slower_than_xla(self) -> bool:
        """Whether jaxgrad takes clearly longer than XLA, by steady times."""
        speedup = self.speedup(XLA)
        return speedup is not None and speedup * _MARGIN < 1 and self.is_steady

    @property
    def is_faster_on_xla(self) -> bool:
        """Whether XLA is faster than kernels of jaxgrad; False where jaxgrad runs on XLA."""
        return self.is_slower_than_xla and self.implementation != "xla"

    @property
    def is_steady(self) -> bool:
        """Whether half of the samples of jaxgrad and of XLA are close to each other, or no sample of XLA is faster."""
        compared = [self.milliseconds[name] for name in (JAXGRAD, XLA) if name in self.milliseconds]
        if len(compared) == 2 and max(compared[0]) < min(compared[1]):
            return True
        quartiles = map(statistics.quantiles, compared)
        return all(upper <= _STEADY * lower for lower, _, upper in quartiles)


@dataclasses.dataclass(frozen=True)
class CallResult:
    """A call, and its passes by name; `total` has the names of the passes that make up the value and all gradients."""

    text: str
    dtype: str
    passes: Mapping[str, PassResult]
    total: tuple[str, ...]

    def milliseconds(self, contender: str) -> float | None:
        """The sum of the medians of the passes in `total`."""
        found = [self.passes[name].median(contender) for name in self.total]
        return None if None in found else sum(each for each in found if each is not None)

    def speedup(self, contender: str) -> float | None:
        return _ratio(self.milliseconds(contender), self.milliseconds(JAXGRAD))


@dataclasses.dataclass(frozen=True)
class Results:
    """A run of the command.

    Attributes:
      environment: the machine and the versions.
      pytorch: the version of PyTorch; empty if it was not measured.
      dtype: of the calls that name none.
      calls: that were measured.
      left_out: what was not measured, with the reason.
    """

    environment: Environment
    pytorch: str
    dtype: str
    calls: Sequence[CallResult]
    left_out: Mapping[str, str]

    @property
    def peers(self) -> tuple[str, ...]:
        return (XLA, PYTORCH) if self.pytorch else (XLA,)

    def speedups(self, contender: str) -> list[float]:
        return [speedup for call in self.calls if (speedup := call.speedup(contender)) is not None]

    def geometric_mean(self, contender: str) -> float | None:
        found = self.speedups(contender)
        return math.exp(statistics.fmean(map(math.log, found))) if found else None


def as_json(results: Results, date: str) -> dict[str, Any]:
    """Every number, ready for `json.dump`."""
    return {
        "format": 1,
        "date": date,
        "environment": dataclasses.asdict(results.environment),
        "pytorch": results.pytorch,
        "dtype": results.dtype,
        "calls": [_call(call, results.peers) for call in results.calls],
        "geometric_means": {peer: results.geometric_mean(peer) for peer in results.peers},
        "left_out": dict(results.left_out),
    }


def _call(call: CallResult, peers: Sequence[str]) -> dict[str, Any]:
    contenders = (JAXGRAD, *peers)
    return {
        "call": call.text,
        "dtype": call.dtype,
        "total": call.total,
        "milliseconds": {name: call.milliseconds(name) for name in contenders},
        "speedup": {peer: call.speedup(peer) for peer in peers},
        "passes": {name: _pass(each, peers) for name, each in call.passes.items()},
    }


def _pass(result: PassResult, peers: Sequence[str]) -> dict[str, Any]:
    return {
        "explained": [dataclasses.asdict(each) for each in result.explained],
        "milliseconds": {
            name: {"median": result.median(name), "samples": list(samples)}
            for name, samples in result.milliseconds.items()
        },
        "speedup": {peer: result.speedup(peer) for peer in peers},
        "xla_is_better": result.is_faster_on_xla,
        "failed": dict(result.failed),
        "is_steady": result.is_steady,
        "difference": result.difference,
    }


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b
