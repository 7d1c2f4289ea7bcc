"""The best that users of jax.lax can do: other flags of XLA, and other ways to write the same convolution."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.contender_names import BEST_FLAGS, LAX_DILATED
from benchmarks.options import Options
from benchmarks.wording import brief

# oneDNN, with the calls that XLA has for it, in place of XLA's newer kernels of convolutions. As flags:
# --xla_cpu_use_onednn=true --xla_cpu_experimental_onednn_custom_call=true
# --xla_cpu_experimental_ynn_fusion_type=-individual_convolution
_FLAGS = {
    "xla_cpu_use_onednn": True,
    "xla_cpu_experimental_onednn_custom_call": True,
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE",
}


def compiler_options(name: str) -> dict[str, Any] | None:
    """Of a contender."""
    return _FLAGS if name.endswith(BEST_FLAGS) else None


def left_out(names: Iterable[str], options: Options) -> dict[str, str]:
    """Of the selected contenders with flags, those that this jaxlib cannot compile, each with the reason."""
    selected = [name for name in names if name.endswith(BEST_FLAGS) and options.wants(name)]
    reason = _why_not() if selected and jax.default_backend() == "cpu" else ""
    return dict.fromkeys(selected, f"this jaxlib lacks a flag: {reason}") if reason else {}


def with_flags(names: Iterable[str], missing: dict[str, str]) -> list[str]:
    """The names, and those of the same contenders with flags, where these can be compiled; none but on a CPU."""
    names = list(names)
    flagged = [name + BEST_FLAGS for name in names] if jax.default_backend() == "cpu" else []
    return names + [name for name in flagged if name not in missing]


@cache
def _why_not() -> str:
    try:
        jax.jit(jnp.sin).lower(1.0).compile(_FLAGS)
    except Exception as error:  # any error of a compiler
        return brief(error)
    return ""


def context_of(name: str) -> Callable[[], AbstractContextManager[None]]:
    """In which the function of a contender is lowered."""
    return _dilating_first if name.removesuffix(BEST_FLAGS) == LAX_DILATED else contextlib.nullcontext


@contextlib.contextmanager
def _dilating_first() -> Iterator[None]:
    """jax.lax, with lax.pad and an ordinary convolution where it would dilate the input of a convolution."""
    own = lax.conv_general_dilated

    def dilated_first(
        lhs: jax.Array,
        rhs: jax.Array,
        window_strides: Sequence[int],
        padding: Any,
        lhs_dilation: Sequence[int] | None = None,
        rhs_dilation: Sequence[int] | None = None,
        dimension_numbers: Any = None,
        *others: Any,
        **settings: Any,
    ) -> jax.Array:
        if lhs_dilation is not None and max(lhs_dilation, default=1) > 1:
            spatial = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers).lhs_spec[2:]
            pads = dict(zip(spatial, zip(padding, lhs_dilation, strict=True), strict=True))
            config = [(*pads[i][0], pads[i][1] - 1) if i in pads else (0, 0, 0) for i in range(lhs.ndim)]
            lhs, padding = lax.pad(lhs, jnp.zeros((), lhs.dtype), config), "VALID"
        return own(lhs, rhs, window_strides, padding, None, rhs_dilation, dimension_numbers, *others, **settings)

    of_conv_transpose = mock.patch.dict(lax.conv_transpose.__globals__, conv_general_dilated=dilated_first)
    jax.clear_caches()  # what was traced before
    with mock.patch.object(lax, "conv_general_dilated", dilated_first), of_conv_transpose:
        yield
    jax.clear_caches()
