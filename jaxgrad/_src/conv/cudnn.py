"""The calls of ffi/cuda/conv_ffi.cc, and the plans behind them.

cuDNN has fast kernels for channels-last operands and good ones for channels-first; operands of neither layout, and
filters, are transposed before the call and results after it, in XLA, which can fuse that with what stands around. A
weight gradient the call transposes itself where it can, and then reverses its window too where that is asked for.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxgrad import _conv_problem, config
from jaxgrad._conv_geometry import Geometry, oriented
from jaxgrad._conv_problem import Problem
from jaxgrad._ffi.conv import CONV_KINDS, _conv_layout, _layout_in_lists, conv_plan_cache_info
from jaxgrad._ffi.registration import cuda, gpu_ordinal, or_empty
from jaxgrad._ffi.transposition import takes_transposition, transposition_problem
from jaxgrad.config import SEARCHES, Settings

_TYPES = ("float32", "float64", "bfloat16", "float16")
_SMALLEST_RESERVE = 32 << 20  # bytes of workspace where no GPU says how much a call needs
_LARGEST_LIMIT = 1 << 30  # bytes of workspace that a call may take unless the settings say otherwise
_LIMITS_SHARE = 16  # and the part of the GPU's memory that they may be


def allows_tf32(precision: Any) -> bool:
    """Whether float32 operands may be rounded to TF32: unless the precision of one is the highest, as in XLA."""
    if precision is None:
        precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    given = precision if isinstance(precision, (tuple, list)) else (precision,)
    return not any(map(_is_highest, given))


def _is_highest(precision: Any) -> bool:
    if isinstance(precision, str) and precision.upper() == "F32_F32_F32":
        return True
    try:
        return lax.Precision(precision) == lax.Precision.HIGHEST
    except ValueError:  # the name of an algorithm for dot products
        return False


class CudaConvCall(NamedTuple):
    """How a call of one unit runs: the layout that its operands are brought to, and the bytes of its workspace."""

    geometry: Geometry
    workspace: int
    engine: str  # cuDNN's, or empty where no GPU is here to ask


class Epilogue(NamedTuple):
    """What the kernel of a forward call does with the convolution's result before it is written, in this order."""

    has_bias: bool = False
    relu: bool = False


_NO_EPILOGUE = Epilogue()


@lru_cache(4096)
def cuda_conv_plan(
    kind: str, problem: Problem, allow_tf32: bool, settings: Settings, epilogue: Epilogue = _NO_EPILOGUE
) -> CudaConvCall | None:
    """The plan of a call; None where cuDNN has none.

    Raises RuntimeError where cuDNN cannot be asked, as where the GPU's memory is full.

    With a GPU here it is built, and by the exhaustive search timed, at once, and is there when the call runs. The bytes
    of workspace depend on cuDNN's lists alone and not on times, so that every host lowers the same program. Without a
    GPU they are a guess that leaves cuDNN a choice; the plan is then made where the program runs.
    """
    device = gpu_ordinal()
    limit = _default_limit(device) if settings.workspace_limit is None else settings.workspace_limit
    layouts = _layouts(problem)
    if epilogue.relu:
        layouts = layouts[:1]  # the copies to another one cost more than what the epilogue saves
    for geometry in layouts:
        shapes = problem.laid_out(geometry).shapes
        if device is None:
            operands = sum(map(math.prod, shapes)) * problem.dtype.itemsize
            return CudaConvCall(geometry, min(limit, max(_SMALLEST_RESERVE, 2 * operands)), "")
        found = cuda.conv_plan(
            device,
            CONV_KINDS.index(kind),
            _TYPES.index(problem.dtype.name),
            shapes,
            _layout_in_lists(geometry),
            **epilogue._asdict(),
            allow_tf32=allow_tf32,
            deterministic=settings.deterministic,
            search=_search(settings),
            workspace_limit=limit,
        )
        if cuda.plan_directory_problem():
            _warn_of_directory(settings.plan_cache_dir)
        if found is not None:
            return CudaConvCall(geometry, *found)
    return None


def _search(settings: Settings) -> int:
    """ConvSearch of ffi/cuda/conv.h."""
    search = settings.search or ("exhaustive" if jax.process_count() == 1 else "heuristic")
    if search == "exhaustive" and settings.deterministic:
        search = "heuristic"  # what is timed may come out otherwise in the next run
    return SEARCHES.index(search)


@cache
def _default_limit(device: int | None) -> int:
    """Bytes; in powers of two, so that GPUs of one kind agree although their memory may differ by a little."""
    if device is None:
        return _LARGEST_LIMIT
    return min(_LARGEST_LIMIT, 1 << (cuda.total_memory(device) // _LIMITS_SHARE).bit_length() - 1)


def use_plan_cache_dir(path: str | None) -> None:
    """Where the exhaustive search's choices are kept from now on, if anywhere."""
    if cuda is not None:
        cuda.use_plan_directory(path or "")


use_plan_cache_dir(config.current().plan_cache_dir)


@cache
def _warn_of_directory(path: str | None) -> None:
    warnings.warn(
        f"jaxgrad cannot keep plans in plan_cache_dir={path!r}, and will time them again in the next process: "
        f"{cuda.plan_directory_problem()}",
        RuntimeWarning,
        stacklevel=2,
    )


def _layouts(problem: Problem) -> list[Geometry]:
    """The layouts to try, the better one first."""
    geometry, n = problem.geometry, len(problem.geometry.w_spatial)
    first, last = tuple(range(n + 2)), (0, n + 1, *range(1, n + 1))
    as_given = geometry.lhs_spec == first and geometry.out_spec == first
    specs = [first, last] if as_given or problem.dtype.name == "float64" else [last, first]
    return [dataclasses.replace(geometry, lhs_spec=spec, rhs_spec=spec, out_spec=spec) for spec in specs]


def transposes_filter(problem: Problem, laid_out: Geometry | None = None) -> bool:
    """Whether a call of the unit backward_filter itself brings dw from the layout of its plan to the caller's, and
    reverses its window where the geometry says so.

    Without a plan, whose layout is `laid_out`, the answer is that for the layout which is tried first.
    """
    geometry, taken = problem.geometry, laid_out or _layouts(problem)[0]
    axes = (problem.out_features, problem.features // geometry.feature_group_count, *geometry.w_spatial)
    turned = range(2, len(axes)) if geometry.window_reversed else ()
    takes = takes_transposition(axes, taken.rhs_spec, geometry.rhs_spec, turned)
    return takes and not transposition_problem(gpu_ordinal())


def _relaid(array: jax.Array, spec: Sequence[int], wanted: Sequence[int]) -> jax.Array:
    """Transposes an array whose logical axes lie as `spec` says so that they lie as `wanted` says."""
    if tuple(spec) == tuple(wanted):
        return array
    return jnp.transpose(array, [spec[wanted.index(axis)] for axis in range(array.ndim)])


def _call(
    kind: str,
    problem: Problem,
    precision: Any,
    settings: Settings,
    operands: dict[str, jax.Array],
    bias: jax.Array | None = None,
    relu: bool = False,
) -> jax.Array:
    """The result of a unit: x, w or y, whichever is not among the operands. Only y may have a bias and relu.

    The operand w is oriented as cuDNN takes it, the result as the unit gives it.
    """
    geometry, dtype = problem.geometry, problem.dtype
    allow_tf32 = allows_tf32(precision)
    plan = cuda_conv_plan(kind, problem, allow_tf32, settings, Epilogue(bias is not None, relu))
    if plan is None:  # the dispatch asked for the call itself; this is one that vmap made of it
        raise NotImplementedError(
            f"cuDNN has no kernel for the unit {kind} of {geometry} under vmap; implementation='xla' runs it"
        )
    g = plan.geometry
    given = {"x": geometry.lhs_spec, "w": geometry.rhs_spec, "y": geometry.out_spec}
    taken = {"x": g.lhs_spec, "w": g.rhs_spec, "y": g.out_spec}
    (result,) = set("xwy") - set(operands)
    own: dict[str, Any] = {}  # the attributes that this unit alone has
    shapes = [dict(zip("xwy", problem.laid_out(g).shapes, strict=True))[result]]
    if result == "y":
        own["relu"] = np.bool_(relu)
    elif result == "w":
        transposes = transposes_filter(problem, g)
        if transposes:
            taken["w"] = geometry.rhs_spec
            shapes.insert(0, problem.w_shape)
        else:
            shapes.append((0,))
        own["dw_spec"] = np.array(taken["w"], np.int64)
        own["dw_reversed"] = np.bool_(transposes and geometry.window_reversed)
    call = jax.ffi.ffi_call(
        f"jaxgrad_conv_{kind}",
        (*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes), jax.ShapeDtypeStruct((plan.workspace,), np.uint8)),
    )
    found, *_ = call(
        *(_relaid(array, given[name], taken[name]) for name, array in operands.items()),
        *([or_empty(bias, dtype)] if result == "y" else []),
        **_conv_layout(g),
        **own,
        allow_tf32=np.bool_(allow_tf32),
        deterministic=np.bool_(settings.deterministic),
        search=np.int64(_search(settings)),
    )
    found = _relaid(found, taken[result], given[result])
    return oriented(geometry, found) if result == "w" and not own["dw_reversed"] else found


def cuda_conv_forward(
    geometry: Geometry,
    precision: Any,
    settings: Settings,
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    relu: bool = False,
) -> jax.Array:
    """y"""
    problem, operands = _conv_problem.of_forward(geometry, x, w), {"x": x, "w": oriented(geometry, w)}
    return _call("forward", problem, precision, settings, operands, bias, relu)


def cuda_conv_backward_input(
    geometry: Geometry, precision: Any, settings: Settings, dy: jax.Array, w: jax.Array
) -> jax.Array:
    """dx"""
    problem = _conv_problem.of_backward_input(geometry, dy, w)
    return _call("backward_input", problem, precision, settings, {"y": dy, "w": oriented(geometry, w)})


def cuda_conv_backward_filter(
    geometry: Geometry, precision: Any, settings: Settings, x: jax.Array, dy: jax.Array
) -> jax.Array:
    """dw"""
    problem = _conv_problem.of_backward_filter(geometry, x, dy)
    return _call("backward_filter", problem, precision, settings, {"x": x, "y": dy})


def plan_cache_info() -> dict[str, dict[str, int]]:
    """The caches of plans that this process holds, by implementation: "cpu" and "cudnn", where they can be loaded.

    Returns:
      For each, "hits", "misses", "size" and "capacity". A plan is a kernel made ready for one shape; the one that was
      not used for longest is dropped when the cache is full. For cuDNN "recorded" counts the plans that XLA recorded
      into CUDA graphs, which are kept besides, and "disk_hits" and "disk_misses" the choices looked for in
      `jaxgrad.config`'s plan_cache_dir.
    """
    found = {"cpu": conv_plan_cache_info(), "cudnn": dict(cuda.conv_plan_cache_info()) if cuda is not None else {}}
    return {name: info for name, info in found.items() if info}
