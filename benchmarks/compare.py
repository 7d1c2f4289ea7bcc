"""One row of the results: contenders that are seen to agree, then timed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.floor import floor_ms, matmul_gflops, memory_gbps
from benchmarks.timing import Contender, Effort, interleaved

# Of ||a - b|| / ||b||. Sums in another order, and TF32 on a GPU; 8 bits of mantissa carried through every step.
_TOLERANCE = {"float32": 1e-2, "bfloat16": 1e-1}
_MEMORY = ("temporary_bytes", "peak_bytes")


@dataclasses.dataclass(frozen=True)
class Work:
    """What is measured.

    Attributes:
      label: the case, as the tables call it.
      measure: which pass, as "forward".
      settings: the same, in full, for the JSON.
      dtype: of the arrays.
      flops: floating-point operations of one call.
      bytes_moved: the fewest bytes that one call must read and write, where that can be the floor.
      array_bytes: sizes to hold the temporary memory against, by name.
      extra: left out of the README's table.
    """

    label: str
    measure: str
    settings: dict[str, Any]
    dtype: str
    flops: int
    array_bytes: dict[str, int]
    extra: bool = False
    bytes_moved: int = 0


def compare(
    work: Work, contenders: Sequence[Contender], effort: Effort, tolerances: Sequence[float] | None = None
) -> dict[str, Any]:
    """The row, ready for JSON. The first contender is jaxgrad, whose time the others are held against.

    `tolerances` are those of each output, by default what suits one op of `work.dtype`.
    """
    if tolerances is None:
        tolerances = [_TOLERANCE[work.dtype]] * len(contenders[0].outputs)
    for contender in contenders[1:]:
        _check_agreement(work, contenders[0], contender, tolerances)
    times = interleaved(contenders, effort)
    ours = times[contenders[0].name].median
    floor = floor_ms(work.flops, work.dtype, work.bytes_moved)
    return {
        **dataclasses.asdict(work),
        "times_ms": {name: dataclasses.asdict(t) for name, t in times.items()},
        "times_slower_than_jaxgrad": {c.name: round(times[c.name].median / ours, 3) for c in contenders[1:]},
        **({"memory_gbps": round(memory_gbps(), 1)} if work.bytes_moved else {}),
        **({"matmul_gflops": round(matmul_gflops(work.dtype), 1)} if work.flops else {}),
        "floor_ms": round(floor, 6),
        "jaxgrad_over_floor": round(ours / floor, 3),
        **{name: {c.name: size for c in contenders if (size := getattr(c, name)) is not None} for name in _MEMORY},
    }


def _check_agreement(work: Work, ours: Contender, other: Contender, tolerances: Sequence[float]) -> None:
    for i, (a, b, tolerance) in enumerate(zip(ours.outputs, other.outputs, tolerances, strict=True)):
        difference = np.linalg.norm(a - b) / np.linalg.norm(b)
        if not difference <= tolerance:
            raise RuntimeError(
                f"{work.label}, {work.measure}: output {i} of {ours.name!r} differs from that of {other.name!r} "
                f"by {difference:.1e} of its norm, more than {tolerance:.0e}"
            )
