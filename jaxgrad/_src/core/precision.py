"""The precision of float32 convolutions and matrix products on a GPU: TF32 or not."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

_PRECISIONS = ("default", "high", "highest")


def default_precision() -> Any:
    """JAX's precision in force for calls that give none: the name of a precision or of an algorithm.

    It is never None, which JAX would resolve again wherever it is used.
    """
    return jax.config.jax_default_matmul_precision or "default"  # type: ignore[attr-defined]


def precision_of_call(precision: Any) -> Any:
    """The precision given to a call, or else JAX's where it is called: its gradients keep it, as those of `jax.lax` do.

    None where there is neither.
    """
    return jax.config.jax_default_matmul_precision if precision is None else precision  # type: ignore[attr-defined]


def precision_flags(dtype: Any, precision: Any) -> list[str]:
    """The words for the precision in the text of a call in a tuning: calls with other words are measured separately.

    The default precision has no word. The precisions of `jax.lax.Precision` have words for float32 only, as products of
    other dtypes do not depend on them. The algorithms for dot products have words for every dtype.
    """
    if precision is None:
        precision = default_precision()
    if dtype == "float32" and not allows_tf32(precision):
        return ["without TF32"]
    given = precision if isinstance(precision, (tuple, list)) else (precision,)
    names = [_name(each) for each in given]
    named = [name for name in names if name != "default" and (dtype == "float32" or name not in _PRECISIONS)]
    return ["precision=" + ",".join(dict.fromkeys(names))] if named else []


def allows_tf32(precision: Any) -> bool:
    """Whether float32 operands may be rounded to TF32: unless the precision of one is the highest, as in XLA."""
    if precision is None:
        precision = default_precision()
    given = precision if isinstance(precision, (tuple, list)) else (precision,)
    return not any(map(_is_highest, given))


def _is_highest(precision: Any) -> bool:
    if isinstance(precision, str) and precision.upper() == "F32_F32_F32":
        return True
    try:
        return lax.Precision(precision) == lax.Precision.HIGHEST
    except ValueError:  # the name of an algorithm for dot products
        return False


def _name(precision: Any) -> str:
    """The name of a precision, the same for all that JAX takes as equal, or of an algorithm for dot products."""
    try:
        return lax.Precision(precision).name.lower()
    except ValueError:
        name = str(getattr(precision, "name", precision))
        return name.lower() if name.lower() in _PRECISIONS else name
