"""The fields of the records, and checks of records that are written."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any


def static_field(default: Any = dataclasses.MISSING) -> Any:
    """A field of a record that is no array, but part of the structure of the pytree."""
    return dataclasses.field(default=default, kw_only=True, metadata={"static": True})


def check_record(function: str, weights: Any, record: type) -> None:
    """Raises TypeError if `weights` are not such a record."""
    if not isinstance(weights, record):
        raise TypeError(f"{function}: weights must be {record.__name__}, got {type(weights).__name__}")


def as_records(function: str, weights: Any, record: type) -> tuple[Any, ...]:
    """A tuple of records from one record or a sequence."""
    records = tuple(weights) if isinstance(weights, Iterable) else (weights,)
    if not records:
        raise ValueError(f"{function}: weights must have at least one {record.__name__}, got {weights!r}")
    for own in records:
        if not isinstance(own, record):
            raise TypeError(
                f"{function}: weights must be {record.__name__} or a sequence of them, got {type(own).__name__}"
            )
    return records
