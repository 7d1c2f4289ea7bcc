"""Attributes of ONNX nodes, checked: an error names the node, the attribute, what was expected and what came."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import onnx

_TYPES = {number: name for name, number in onnx.AttributeProto.AttributeType.items()}


class Attributes:
    """The attributes of a node. Each method returns the value of one, or the default if the node does not have it."""

    def __init__(self, function: str, node: onnx.NodeProto) -> None:
        self.label = f"{function}: the node {node.name!r}"
        self._attributes = {attribute.name: attribute for attribute in node.attribute}

    def error(self, name: str, expected: str, found: Any) -> ValueError:
        return ValueError(f"{self.label} must have {name} {expected}, got {found}")

    def integer(self, name: str, default: int, choices: Sequence[int] | None = None) -> int:
        value = self._value(name, "INT", default)
        if choices is not None and value not in choices:
            raise self.error(name, f"of {' or '.join(map(str, choices))}", value)
        return value

    def integers(self, name: str, default: int, count: int, least: int) -> tuple[int, ...]:
        values = tuple(self._value(name, "INTS", (default,) * count))
        if len(values) != count or min(values, default=least) < least:
            raise self.error(name, f"with {count} ints of at least {least}", list(values))
        return values

    def check_same(self, name: str, expected: int | Sequence[int], source: str) -> None:
        """Checks that an attribute repeats what the shape of an input says."""
        kind, expected = ("INT", expected) if isinstance(expected, int) else ("INTS", list(expected))
        value = self._value(name, kind, expected)
        if value != expected:
            raise self.error(name, f"{expected}, as {source}", value)

    def check_absent(self, name: str, hint: str) -> None:
        if name in self._attributes:
            found = onnx.helper.printable_attribute(self._attributes[name])
            raise ValueError(f"{self.label} must have {hint} instead of {name}, got {found}")

    def number(self, name: str, default: float | None) -> Any:
        value = self._value(name, "FLOAT", default)
        if value is not None and math.isnan(value):
            raise self.error(name, "that is a number", value)
        return value

    def text(self, name: str, default: str, choices: Sequence[str]) -> str:
        value = self._value(name, "STRING", default.encode()).decode(errors="replace")
        if value not in choices:
            raise self.error(name, f"of {', '.join(map(repr, choices))}", repr(value))
        return value

    def texts(self, name: str) -> list[str]:
        return [value.decode(errors="replace") for value in self._value(name, "STRINGS", ())]

    def _value(self, name: str, kind: str, default: Any) -> Any:
        if name not in self._attributes:
            return default
        attribute = self._attributes[name]
        found = _TYPES.get(attribute.type, str(attribute.type))
        if found != kind or attribute.ref_attr_name:
            found = f"a reference to {attribute.ref_attr_name!r}" if attribute.ref_attr_name else found
            raise self.error(name, f"of the type {kind}", found)
        return onnx.helper.get_attribute_value(attribute)
