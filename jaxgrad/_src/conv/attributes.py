"""A convolution as the compiled handlers and planners take it."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxgrad._src.conv.geometry import ConvGeometry


def geometry_attributes(geometry: ConvGeometry) -> dict[str, Any]:
    """Returns the attributes that every convolution handler has, as lists of ints and an int."""
    return {
        "lhs_spec": list(geometry.lhs_spec),
        "rhs_spec": list(geometry.rhs_spec),
        "out_spec": list(geometry.out_spec),
        "window_strides": list(geometry.window_strides),
        "padding": np.ravel(geometry.padding).tolist(),
        "rhs_dilation": list(geometry.rhs_dilation),
        "feature_group_count": geometry.feature_group_count,
    }
