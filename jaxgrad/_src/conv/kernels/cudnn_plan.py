"""cuDNN's plans for the convolution passes: layouts, workspace, and how engines are searched."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from functools import cache
from typing import NamedTuple

import jax

from jaxgrad._src.choice.settings import SEARCHES, Settings
from jaxgrad._src.conv.backend import PASSES
from jaxgrad._src.conv.call.geometry import ConvGeometry
from jaxgrad._src.conv.call.kernel_layouts import kernel_layouts
from jaxgrad._src.conv.call.problem import ConvProblem
from jaxgrad._src.core.jax_internals import cleared_lru_cache
from jaxgrad._src.native import cuda
from jaxgrad._src.run.plan_directory import plan_directory

_logger = logging.getLogger("jaxgrad")

_MIN_WORKSPACE = 32 << 20  # bytes, where there is no GPU to ask
_MAX_WORKSPACE_LIMIT = 1 << 30  # bytes, unless the settings have a limit
_WORKSPACE_LIMIT_DIVISOR = 16  # of the GPU's memory, for small GPUs


class Epilogue(NamedTuple):
    """The operations of the forward kernel on the convolution's result, in this order."""

    has_bias: bool = False
    relu: bool = False


_NO_EPILOGUE = Epilogue()


class CudnnPlan(NamedTuple):
    """How a call runs: the layouts of its operands, bytes of workspace, and the engine (empty without a GPU)."""

    geometry: ConvGeometry
    workspace: int
    engine: str


@cleared_lru_cache(4096)
def cudnn_plan(
    pass_name: str, problem: ConvProblem, allow_tf32: bool, settings: Settings, epilogue: Epilogue = _NO_EPILOGUE
) -> CudnnPlan | None:
    """Returns the plan of a call, or None if cuDNN has none.

    With a GPU on this machine the plan is built at once, and timed by the exhaustive search. The C++ module keeps it
    for the call. An engine whose result is wrong is not used: ffi/cuda/cudnn_conv/engine_check.h. The workspace depends
    on cuDNN's lists of engines and not on times, and not on checks unless no right engine fits into it, so that every
    host lowers the same program. Without a GPU the workspace is an estimate that leaves cuDNN a choice of engines, and
    the plan is built where the program runs.

    Raises:
      RuntimeError: cuDNN failed, for instance because the GPU's memory is full.
    """
    device = cuda.gpu_ordinal()
    limit = _default_workspace_limit(device) if settings.workspace_limit is None else settings.workspace_limit
    layouts = kernel_layouts(problem)
    if epilogue.relu:
        layouts = layouts[:1]  # transposes to another layout cost more than the epilogue saves
    for geometry in layouts:
        shapes = problem.with_geometry(geometry).shapes
        if device is None:
            operands = sum(map(math.prod, shapes)) * problem.dtype.itemsize
            return CudnnPlan(geometry, min(limit, max(_MIN_WORKSPACE, 2 * operands)), "")
        with contextlib.suppress(RuntimeError):  # without NVRTC the engine is used unchecked
            cuda.nvrtc_unavailable()
        start = time.perf_counter()
        with plan_directory():
            found = cuda.module.conv_plan(
                device,
                PASSES.index(pass_name),
                cuda.float_type(problem.dtype),
                shapes,
                geometry.attributes(),
                **epilogue._asdict(),
                allow_tf32=allow_tf32,
                deterministic=settings.deterministic,
                search=search_mode(settings),
                workspace_limit=limit,
            )
        if found is not None:
            plan = CudnnPlan(geometry, *found)
            _logger.debug(
                "cuDNN's plan of %s for %s, found in %.3f s: engine %s, workspace of %d bytes",
                pass_name,
                shapes,
                time.perf_counter() - start,
                plan.engine,
                plan.workspace,
            )
            return plan
    return None


def search_mode(settings: Settings) -> int:
    """The number of the search in ffi/cuda: ConvSearch."""
    search = settings.search or ("exhaustive" if jax.process_count() == 1 else "heuristic")
    if search == "exhaustive" and settings.deterministic:
        search = "heuristic"  # times may lead to another choice in the next run
    return SEARCHES.index(search)


@cache
def _default_workspace_limit(device: int | None) -> int:
    """Bytes; a power of two, so that GPUs of one kind agree although their memory may differ a little."""
    if device is None:
        return _MAX_WORKSPACE_LIMIT
    share = cuda.module.total_memory(device) // _WORKSPACE_LIMIT_DIVISOR
    return min(_MAX_WORKSPACE_LIMIT, 1 << share.bit_length() - 1)
