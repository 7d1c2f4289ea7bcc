"""Families of convolutions, for charts that have one bar for all cases of a family."""

from __future__ import annotations

from typing import Any


def family(settings: dict[str, Any]) -> str:
    """The first that fits the settings of a case (conv_cases.Case)."""
    if settings.get("causal"):
        return "1D, causal"
    if settings["transposed"]:
        return "transposed"
    if settings["groups"] > 1:
        return "depthwise" if settings["groups"] == settings["features"] else "grouped"
    if settings["dilation"] > 1:
        return "dilated"
    if settings["window"] == 1:
        return "1x1"
    if len(settings["spatial"]) == 3:
        return "3D, dense"
    return "2D, strided" if settings["stride"] > 1 else "2D, dense"
