"""One row of a report: the contenders' outputs are compared, then the contenders are timed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.options import Effort
from benchmarks.roofline import fma_gflops, matmul_gflops, memory_gbps, roofline_ms
from benchmarks.timing import Contender, interleaved, raised
from benchmarks.wording import brief

# Limits of ||a - b|| / ||b||. float32: another order of summation, and TF32 on a GPU; bfloat16: 8 bits of mantissa.
TOLERANCE = {"float32": 1e-2, "bfloat16": 1e-1}
_MEMORY = ("temporary_bytes", "peak_bytes")


@dataclasses.dataclass(frozen=True)
class Work:
    """What is measured.

    Attributes:
      label: the name of the case in the tables.
      measure: the pass, as "forward".
      settings: the case in full, for the JSON.
      dtype: of the arrays.
      flops: floating-point operations of one call.
      bytes_moved: the fewest bytes that one call must read and write; 0 where the arithmetic bounds the time.
      array_bytes: sizes of arrays to compare the memory with, by name.
      extra: the row is not in the tables of docs/benchmarks/.
      precision: of matrix products, as `jax.default_matmul_precision` takes it; None for JAX's default one.
      is_product: whether the roofline counts the operations at the rate of matrix products; at that of float32
        multiply-adds otherwise.
    """

    label: str
    measure: str
    settings: dict[str, Any]
    dtype: str
    flops: int
    array_bytes: dict[str, int]
    extra: bool = False
    bytes_moved: int = 0
    precision: str | None = None
    is_product: bool = True


def precision_in_use(dtype: str) -> str:
    """ "TF32" for float32 on a GPU, whose products round to it by default; the dtype otherwise."""
    return "TF32" if dtype == "float32" and jax.default_backend() == "gpu" else dtype


def compare(
    work: Work, contenders: Sequence[Contender], effort: Effort, tolerances: Sequence[float] | None = None
) -> dict[str, Any]:
    """The row, ready for JSON. The first contender is jaxgrad; ratios are over its time.

    `tolerances` has one limit for each output; by default each has the limit of one op of `work.dtype`.
    """
    for contender in contenders[1:]:
        check_agreement(work, contenders[0], contender, tolerances)
    times = interleaved(contenders, effort)
    ours = times[contenders[0].name].median
    gflops = _gflops(work)
    floor = roofline_ms(work.flops, gflops, work.bytes_moved)
    return {
        **dataclasses.asdict(work),
        "times_ms": {name: dataclasses.asdict(t) for name, t in times.items()},
        "times_slower_than_jaxgrad": {c.name: round(times[c.name].median / ours, 3) for c in contenders[1:]},
        **({"memory_gbps": round(memory_gbps(), 1)} if work.bytes_moved else {}),
        **({"matmul_gflops" if work.is_product else "fma_gflops": round(gflops, 1)} if work.flops else {}),
        "floor_ms": round(floor, 6),
        "jaxgrad_over_floor": round(ours / floor, 3),
        **{name: {c.name: size for c in contenders if (size := getattr(c, name)) is not None} for name in _MEMORY},
    }


def _gflops(work: Work) -> float:
    """The rate of the arithmetic in the roofline; 1 without arithmetic, because to measure a rate takes seconds."""
    if not work.flops:
        return 1.0
    return matmul_gflops(work.dtype, work.precision) if work.is_product else fma_gflops()


def check_agreement(work: Work, ours: Contender, other: Contender, tolerances: Sequence[float] | None = None) -> None:
    """Raises RuntimeError where the outputs differ in shape or by more than `tolerances`, as in `compare`.

    A contender with has_same_results=False is not compared.
    """
    if not other.has_same_results:
        return
    if tolerances is None:
        tolerances = [TOLERANCE[work.dtype]] * len(ours.outputs)
    for i, (a, b, tolerance) in enumerate(zip(ours.outputs, other.outputs, tolerances, strict=True)):
        if a.shape != b.shape:
            raise RuntimeError(
                f"{work.label}, {work.measure}: output {i} of {ours.name!r} has the shape {a.shape}, that of "
                f"{other.name!r} {b.shape}"
            )
        difference = np.linalg.norm(a - b) / np.linalg.norm(b)
        if not difference <= tolerance:
            raise RuntimeError(
                f"{work.label}, {work.measure}: output {i} of {ours.name!r} differs from that of {other.name!r} "
                f"by {difference:.1e} of its norm, more than {tolerance:.0e}"
            )


def agreeing(
    work: Work,
    found: dict[str, Contender | Exception],
    where: str,
    left_out: dict[str, str],
    tolerances: Sequence[float] | None = None,
) -> list[Contender]:
    """The contenders that work and agree with the first one, which must; the reasons of the others in `left_out`.

    Empties `found`: the state of a contender that fails fills memory. `where` is for the reasons.
    """
    contenders: list[Contender] = []
    for name in list(found):
        try:
            (contender,) = raised([found.pop(name)])
            if contenders:
                check_agreement(work, contenders[0], contender, tolerances)
        except Exception as error:  # any error of a compiler or a library; the other contenders are still measured
            if not contenders:
                raise
            left_out[f"{name}, of {where}"] = brief(error)
            print(f"  left out: {name} of {where} ({brief(error)})", flush=True)
        else:
            contenders.append(contender)
    return contenders
