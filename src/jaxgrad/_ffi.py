"""The only place that calls `jax.ffi`: registers the compiled handlers and spells out each call's attributes.

An absent operand is passed, and an unwanted result asked for, as an array without elements.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrad._conv_geometry import Geometry, shape_of

_cpu: Any
try:
    _cpu = importlib.import_module("jaxgrad._cpu")
except ImportError as error:
    _cpu, _cpu_error = None, f"the compiled module cannot be loaded ({error})"
else:
    _cpu_error = ""
    for _name, _capsule in _cpu.registrations().items():
        jax.ffi.register_ffi_target(_name, _capsule, platform="cpu")


def cpu_problem() -> str:
    """Why the CPU kernels cannot be used; empty when they can."""
    return _cpu_error


def cpu_targets() -> tuple[str, ...]:
    """The names of the registered CPU handlers."""
    return tuple(sorted(_cpu.registrations())) if _cpu is not None else ()


def cpu_build() -> dict[str, str]:
    """What the compiled module says of itself: FFI API version, compiler, the instruction set in use."""
    return dict(_cpu.build_info()) if _cpu is not None else {}


def _load_onednn() -> str:
    """Opens oneDNN for the compiled module; says what is wrong, or nothing."""
    if _cpu is None:
        return _cpu_error
    try:
        files = importlib.metadata.files(_ONEDNN) or []
    except importlib.metadata.PackageNotFoundError:
        return f"oneDNN is not installed (the package {_ONEDNN})"
    for file in files:
        if file.name == "libdnnl.so.3":
            try:
                _cpu.load_onednn(str(file.locate()))
            except RuntimeError as error:
                return f"oneDNN cannot be loaded ({error})"
            return ""
    return f"the package {_ONEDNN} has no libdnnl.so.3"


_ONEDNN = "onednn-cpu-gomp"
_onednn_error = _load_onednn()


def onednn_problem() -> str:
    """Why oneDNN's kernels cannot be used; empty when they can."""
    return _onednn_error


class GruSizes(NamedTuple):
    """T time steps, B rows, I inputs, H hidden units, D directions."""

    T: int
    B: int
    I: int  # noqa: E741
    H: int
    D: int


_DIRECTIONS = {"forward": 0, "reverse": 1, "bidirectional": 2}


def _attributes(direction: str, linear_before_reset: bool, clip: float | None) -> dict[str, Any]:
    return {
        "direction": np.int64(_DIRECTIONS[direction]),
        "linear_before_reset": np.bool_(linear_before_reset),
        "clip": np.float64(np.inf if clip is None else clip),  # infinity: no clipping
    }


def _or_empty(array: jax.Array | None, dtype: Any) -> jax.Array:
    return jnp.zeros((0,), dtype) if array is None else array


def gru_forward(
    x: jax.Array,
    w: jax.Array,
    r: jax.Array,
    b: jax.Array | None,
    sequence_lens: jax.Array | None,
    initial_h: jax.Array | None,
    *,
    sizes: GruSizes,
    direction: str,
    linear_before_reset: bool,
    clip: float | None,
    training: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`(y, y_h, gates)`; `gates` has no elements unless `training`."""
    T, B, _, H, D = sizes
    n_gates = 4 if linear_before_reset else 3
    workspace = _cpu.gru_forward_workspace(*sizes, linear_before_reset, x.dtype.itemsize)
    call = jax.ffi.ffi_call(
        "jaxgrad_gru_forward",
        (
            jax.ShapeDtypeStruct((T, D, B, H), x.dtype),
            jax.ShapeDtypeStruct((D, B, H), x.dtype),
            jax.ShapeDtypeStruct((T, D, B, n_gates * H) if training else (0,), x.dtype),
            jax.ShapeDtypeStruct((workspace,), np.uint8),
        ),
    )
    y, y_h, gates, _ = call(
        x,
        w,
        r,
        _or_empty(b, x.dtype),
        _or_empty(sequence_lens, np.int32),
        _or_empty(initial_h, x.dtype),
        **_attributes(direction, linear_before_reset, clip),
    )
    return y, y_h, gates


def gru_backward(
    x: jax.Array,
    w: jax.Array,
    r: jax.Array,
    sequence_lens: jax.Array | None,
    initial_h: jax.Array | None,
    y: jax.Array,
    gates: jax.Array,
    dy: jax.Array | None,
    dy_h: jax.Array | None,
    *,
    sizes: GruSizes,
    direction: str,
    linear_before_reset: bool,
    clip: float | None,
    wanted: tuple[bool, ...],
) -> tuple[jax.Array, ...]:
    """`(dx, dw, dr, db, dh0)`; a gradient that is not `wanted` has no elements."""
    _, B, _, H, D = sizes
    shapes = (x.shape, w.shape, r.shape, (D, 6 * H), (D, B, H))
    workspace = _cpu.gru_backward_workspace(*sizes, linear_before_reset, x.dtype.itemsize)
    call = jax.ffi.ffi_call(
        "jaxgrad_gru_backward",
        (
            *(
                jax.ShapeDtypeStruct(shape if want else (0,), x.dtype)
                for shape, want in zip(shapes, wanted, strict=True)
            ),
            jax.ShapeDtypeStruct((workspace,), np.uint8),
        ),
    )
    *gradients, _ = call(
        x,
        w,
        r,
        _or_empty(sequence_lens, np.int32),
        _or_empty(initial_h, x.dtype),
        y,
        gates,
        _or_empty(dy, x.dtype),
        _or_empty(dy_h, x.dtype),
        **_attributes(direction, linear_before_reset, clip),
    )
    return tuple(gradients)


# --- convolution ---------------------------------------------------------------------------------------------------

CONV_KINDS = ("forward", "backward_input", "backward_filter")


def _conv_layout(geometry: Geometry) -> dict[str, Any]:
    return {
        "lhs_spec": np.array(geometry.lhs_spec, np.int64),
        "rhs_spec": np.array(geometry.rhs_spec, np.int64),
        "out_spec": np.array(geometry.out_spec, np.int64),
        "window_strides": np.array(geometry.window_strides, np.int64),
        "padding": np.array(geometry.padding, np.int64).reshape(-1),
        "rhs_dilation": np.array(geometry.rhs_dilation, np.int64),
        "feature_group_count": np.int64(geometry.feature_group_count),
    }


def _conv_shapes(geometry: Geometry, batch: int, features: int, out_features: int) -> tuple[tuple[int, ...], ...]:
    """The shapes of x, w and y."""
    g = geometry
    return (
        shape_of(g.lhs_spec, batch, features, g.x_spatial),
        shape_of(g.rhs_spec, out_features, features // g.feature_group_count, g.w_spatial),
        shape_of(g.out_spec, batch, out_features, g.y_spatial),
    )


class ConvPlan(NamedTuple):
    """What the compiled module says of one call: the bytes of scratch, and oneDNN's name of the kernel."""

    workspace: int
    implementation: str


@cache
def conv_plan(
    kind: str, geometry: Geometry, batch: int, features: int, out_features: int, dtype: str, has_bias: bool
) -> ConvPlan | None:
    """The plan of a call, built while it is lowered and kept for the call itself; None where oneDNN has none."""
    shapes = _conv_shapes(geometry, batch, features, out_features)
    layout = {name: np.asarray(value).reshape(-1).tolist() for name, value in _conv_layout(geometry).items()}
    layout["feature_group_count"] = geometry.feature_group_count
    found = _cpu.conv_plan(CONV_KINDS.index(kind), dtype == "bfloat16", has_bias, *map(list, shapes), **layout)
    return None if found is None else ConvPlan(*found)


def _conv_compute(array: jax.Array) -> jax.Array:
    """float16 is computed in float32; so is bfloat16 where the processor has no instructions that oneDNN uses for it."""
    narrow = array.dtype == jnp.float16 or (array.dtype == jnp.bfloat16 and not onednn_has_bfloat16())
    return array.astype(jnp.float32) if narrow else array


@cache
def onednn_has_bfloat16() -> bool:
    """Whether oneDNN has real kernels for bfloat16 on this processor."""
    g = Geometry((0, 1, 2), (0, 1, 2), (0, 1, 2), (1,), ((0, 0),), (1,), 1, (32,), (3,))
    plan = conv_plan("forward", g, 1, 64, 64, "bfloat16", False)
    return plan is not None and "ref" not in plan.implementation


def _conv_call(
    kind: str, geometry: Geometry, sizes: tuple[int, int, int], operands: tuple[jax.Array, ...], has_bias: bool
) -> tuple[jax.Array, ...]:
    dtype = operands[0].dtype
    operands = tuple(map(_conv_compute, operands))
    compute = operands[0].dtype
    x, w, y = _conv_shapes(geometry, *sizes)
    plan = conv_plan(kind, geometry, *sizes, compute.name, has_bias)
    assert plan is not None, "the dispatch lets no call through that oneDNN has no kernel for"
    results = {"forward": [y], "backward_input": [x], "backward_filter": [w, (sizes[2],) if has_bias else (0,)]}[kind]
    call = jax.ffi.ffi_call(
        f"jaxgrad_conv_{kind}",
        (*(jax.ShapeDtypeStruct(s, compute) for s in results), jax.ShapeDtypeStruct((plan.workspace,), np.uint8)),
    )
    *found, _ = call(*operands, **_conv_layout(geometry))
    return tuple(result.astype(dtype) for result in found)


def conv_forward(geometry: Geometry, x: jax.Array, w: jax.Array, bias: jax.Array | None) -> jax.Array:
    """y"""
    sizes = (x.shape[geometry.lhs_spec[0]], x.shape[geometry.lhs_spec[1]], w.shape[geometry.rhs_spec[0]])
    operands = (x, w, _or_empty(bias, x.dtype))
    return _conv_call("forward", geometry, sizes, operands, bias is not None)[0]


def conv_backward_input(geometry: Geometry, dy: jax.Array, w: jax.Array) -> jax.Array:
    """dx"""
    features = w.shape[geometry.rhs_spec[1]] * geometry.feature_group_count
    sizes = (dy.shape[geometry.out_spec[0]], features, dy.shape[geometry.out_spec[1]])
    return _conv_call("backward_input", geometry, sizes, (dy, w), False)[0]


def conv_backward_filter(
    geometry: Geometry, want_bias: bool, x: jax.Array, dy: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """(dw, db)"""
    sizes = (x.shape[geometry.lhs_spec[0]], x.shape[geometry.lhs_spec[1]], dy.shape[geometry.out_spec[1]])
    dw, db = _conv_call("backward_filter", geometry, sizes, (x, dy), want_bias)
    return dw, db if want_bias else None


def conv_plan_cache_info() -> dict[str, int]:
    """Hits, misses, size and capacity of the cache of oneDNN's plans."""
    return dict(_cpu.conv_plan_cache_info()) if _cpu is not None else {}
