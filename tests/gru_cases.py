"""Random inputs for the tests of the GRU: unequal sizes, and gates that do not saturate."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from tolerances import input_dtype


class Inputs(NamedTuple):
    """The array arguments of `jaxgrad.gru`, in its order. `reset` and `reset_h` are keyword-only there."""

    x: Any
    w: Any
    r: Any
    b: Any = None
    sequence_lens: Any = None
    initial_h: Any = None
    reset: Any = None
    reset_h: Any = None


OPTIONAL = ("b", "sequence_lens", "initial_h", "reset", "reset_h")


class Cotangents(NamedTuple):
    """Cotangents of the two results; None for a result that the loss does not read."""

    y: Any
    y_h: Any


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: sizes, settings, and which optional arrays are given."""

    T: int = 5
    B: int = 3
    I: int = 4  # noqa: E741
    H: int = 6
    direction: str = "forward"
    linear_before_reset: bool = False
    clip: float | None = None
    b: bool = True
    sequence_lens: bool = True
    initial_h: bool = True
    reset: bool = True
    reset_h: bool = True
    seed: int = 0

    @property
    def D(self) -> int:  # noqa: N802
        return 2 if self.direction == "bidirectional" else 1

    @property
    def settings(self) -> dict[str, Any]:
        return {"direction": self.direction, "linear_before_reset": self.linear_before_reset, "clip": self.clip}

    @property
    def terms(self) -> int:
        """Length of the longest sum in any result, for the tolerances."""
        return max(self.T * self.B, self.I + self.H, 3 * self.H)

    def replace(self, **changes: Any) -> Case:
        return dataclasses.replace(self, **changes)

    def bare(self) -> Case:
        """The case without the optional arrays."""
        return self.replace(**dict.fromkeys(OPTIONAL, False))

    def __str__(self) -> str:
        flags = [self.direction, "after" if self.linear_before_reset else "before"]
        flags += [f"no_{name}" for name in OPTIONAL if not getattr(self, name)]
        flags += [] if self.clip is None else [f"clip{self.clip}"]
        return f"T{self.T}-B{self.B}-I{self.I}-H{self.H}-" + "-".join(flags)


def lengths(T: int, B: int, rng: np.random.Generator) -> np.ndarray:
    """Random lengths of the rows. With three rows or more, 0, 1 and T are among them."""
    values = rng.integers(0, T + 1, B)
    values[: min(B, 3)] = [T, 0, min(1, T)][: min(B, 3)]
    return rng.permutation(values).astype(np.int32)


def make_inputs(case: Case, dtype: str = "float64") -> tuple[Inputs, Cotangents]:
    """NumPy arrays of `dtype`. Weights are scaled by the inverse square root of their fan-in."""
    T, B, I, H, D = case.T, case.B, case.I, case.H, case.D  # noqa: E741
    rng = np.random.default_rng([case.seed, T, B, I, H])

    def normal(scale: float, *shape: int) -> np.ndarray:
        return (scale * rng.standard_normal(shape)).astype(input_dtype(dtype))

    x, w, r = normal(1, T, B, I), normal(I**-0.5, D, 3 * H, I), normal(H**-0.5, D, 3 * H, H)
    b, initial_h = normal(0.3, D, 6 * H), normal(0.5, D, B, H)
    sequence_lens = lengths(T, B, rng)
    cotangents = Cotangents(normal(1, T, D, B, H), normal(1, D, B, H))
    inputs = Inputs(
        x,
        w,
        r,
        b if case.b else None,
        sequence_lens if case.sequence_lens else None,
        initial_h if case.initial_h else None,
        rng.random((T, B)) < 0.3 if case.reset else None,
        normal(0.5, D, B, H) if case.reset and case.reset_h else None,
    )
    return inputs, cotangents


def is_padding(inputs: Inputs) -> np.ndarray:
    """Boolean [T, B]: True for the steps past the length of their row."""
    T, B = inputs.x.shape[:2]
    if inputs.sequence_lens is None:
        return np.zeros((T, B), bool)
    return np.arange(T)[:, None] >= np.asarray(inputs.sequence_lens)[None, :]


def fill_padding(inputs: Inputs, value: float) -> Inputs:
    """`inputs` with the padding of x, the steps past the length of each row, set to `value`."""
    x = np.where(is_padding(inputs)[..., None], np.asarray(value, inputs.x.dtype), inputs.x)
    return inputs._replace(x=x)
