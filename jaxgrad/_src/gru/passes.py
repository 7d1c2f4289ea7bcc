"""The kernel calls of the GRU, one to each pass: jitted, with their rules for `vmap` and for meshes.

Rows of a batch do not depend on each other: a mapped axis is folded into the batch, and a mesh may split it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax

from jaxgrad import _ffi, _gru_xla
from jaxgrad._batching import fold_or_loop
from jaxgrad._dispatch import Route
from jaxgrad._partitioning import Layout, dims, jitted, over_mesh


@dataclasses.dataclass(frozen=True)
class Spec:
    """The static arguments of one call."""

    direction: str
    linear_before_reset: bool
    clip: float | None
    route: Route

    @property
    def attributes(self) -> dict[str, Any]:
        return {"direction": self.direction, "linear_before_reset": self.linear_before_reset, "clip": self.clip}


def _sizes(x: jax.Array, r: jax.Array) -> _ffi.GruSizes:
    T, B, I = x.shape  # noqa: E741
    return _ffi.GruSizes(T, B, I, H=r.shape[2], D=r.shape[0])


# The axis that holds the batch, by operand and result: what a mapped axis can be folded into.
_AXIS = {"x": 1, "sequence_lens": 0, "initial_h": 1, "y": 2, "y_h": 1, "gates": 2}
_RANK = {"x": 3, "weights": 3, "b": 2, "sequence_lens": 1, "initial_h": 3, "y": 4, "y_h": 3, "gates": 4}

# The dimensions that may be split over a mesh: the batch.
_NAMES = {name: dims(rank, **({"B": _AXIS[name]} if name in _AXIS else {})) for name, rank in _RANK.items()}


@cache
def forward_unit(spec: Spec, training: bool) -> Callable[..., Any]:
    """(x, w, r, b, sequence_lens, initial_h) -> (y, y_h, gates), jitted, with a batching rule of our own."""

    def kernel(x, w, r, b, sequence_lens, initial_h):
        arrays = (x, w, r, b, sequence_lens, initial_h)
        return _ffi.gru_forward(*arrays, sizes=_sizes(x, r), **spec.attributes, training=training)

    xla = partial(_gru_xla.forward, **spec.attributes, training=training)
    operands = (_NAMES["x"], *[_NAMES["weights"]] * 2, _NAMES["b"], _NAMES["sequence_lens"], _NAMES["initial_h"])
    layout = Layout(operands, (_NAMES["y"], _NAMES["y_h"], _NAMES["gates"] if training else (None,)))
    unit = fold_or_loop(
        over_mesh(layout, lambda *_: spec.route, {"cpu": kernel}, xla),
        in_axes=(_AXIS["x"], None, None, None, _AXIS["sequence_lens"], _AXIS["initial_h"]),
        out_axes=(_AXIS["y"], _AXIS["y_h"], _AXIS["gates"] if training else None),
    )
    return jitted(unit, "gru_forward", spec, training)


@cache
def backward_unit(spec: Spec, wanted: tuple[bool, ...]) -> Callable[..., Any]:
    """(x, w, r, sequence_lens, initial_h, y, gates, dy, dy_h) -> (dx, dw, dr, db, dh0), None where not wanted."""

    def kernel(x, w, r, *rest):
        gradients = _ffi.gru_backward(x, w, r, *rest, sizes=_sizes(x, r), **spec.attributes, wanted=wanted)
        return tuple(g if want else None for g, want in zip(gradients, wanted, strict=True))

    def xla(*arrays):
        return tuple(_gru_xla.backward(*arrays, **spec.attributes, wanted=wanted))

    arguments = ("x", "weights", "weights", "sequence_lens", "initial_h", "y", "gates", "y", "y_h")
    gradients = ("x", "weights", "weights", "b", "initial_h")
    layout = Layout(
        tuple(_NAMES[name] for name in arguments),
        tuple(_NAMES[name] if want else None for name, want in zip(gradients, wanted, strict=True)),
        summed=("B",),
    )
    unit = fold_or_loop(
        over_mesh(layout, lambda *_: spec.route, {"cpu": kernel}, xla),
        in_axes=(
            _AXIS["x"],
            None,
            None,
            _AXIS["sequence_lens"],
            _AXIS["initial_h"],
            _AXIS["y"],
            _AXIS["gates"],
            _AXIS["y"],
            _AXIS["y_h"],
        ),
        out_axes=(_AXIS["x"], None, None, None, _AXIS["initial_h"]),
        foldable=not any(wanted[1:4]),  # the gradients of w, r and b add up over the batch
    )
    return jitted(unit, "gru_backward", spec, wanted)
