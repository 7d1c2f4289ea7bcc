"""Accelerated convolutions, and the gradients that JAX writes of them, run on what jaxgrad's ops select."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from cuda_module import NEEDS_CUDA_MODULE
from preferring import with_instruction_set, with_other_preferences

import jaxgrad

_CONV, _TRANSPOSED = "conv_general_dilated", "conv_transpose"
_LAYOUTS = {
    1: ("NWC", "WIO", "NWC"),
    2: ("NHWC", "HWIO", "NHWC"),
    3: ("NDHWC", "DHWIO", "NDHWC"),
}
# The op, the shapes of x and w, and the other arguments.
_CASES = {
    "unit stride": (_CONV, (64, 28, 28, 128), (3, 3, 128, 128), {"padding": "SAME"}),
    "stride": (_CONV, (64, 28, 28, 128), (3, 3, 128, 128), {"window_strides": (2, 2), "padding": ((1, 1), (1, 1))}),
    "stride, uneven padding": (
        _CONV,
        (64, 28, 28, 128),
        (3, 3, 128, 128),
        {"window_strides": (2, 2), "padding": "SAME"},
    ),
    "stride, odd sizes": (_CONV, (64, 27, 29, 128), (3, 3, 128, 128), {"window_strides": (2, 2), "padding": "SAME"}),
    "1x1 with a stride": (_CONV, (64, 28, 28, 128), (1, 1, 128, 128), {"window_strides": (2, 2), "padding": "VALID"}),
    "windows that do not overlap": (_CONV, (64, 28, 28, 128), (2, 2, 128, 128), {"window_strides": (2, 2)}),
    "images": (_CONV, (64, 56, 56, 3), (7, 7, 3, 64), {"window_strides": (2, 2), "padding": ((3, 3), (3, 3))}),
    "dilation": (_CONV, (64, 28, 28, 128), (3, 3, 128, 128), {"rhs_dilation": (2, 2), "padding": "SAME"}),
    "causal": (_CONV, (8, 4096, 128), (2, 128, 128), {"rhs_dilation": (4,), "padding": ((4, 0),)}),
    "groups": (_CONV, (64, 28, 28, 64), (3, 3, 8, 64), {"padding": "SAME", "feature_group_count": 8}),
    "depthwise": (_CONV, (64, 28, 28, 64), (3, 3, 1, 64), {"padding": "SAME", "feature_group_count": 64}),
    "depthwise with a stride": (
        _CONV,
        (64, 28, 28, 64),
        (3, 3, 1, 64),
        {"window_strides": (2, 2), "padding": ((1, 1), (1, 1)), "feature_group_count": 64},
    ),
    **{
        f"depthwise, {name}": (
            _CONV,
            (16, size, size + 1, 96),
            (7, 7, 1, 96),
            {"padding": "SAME", "feature_group_count": 96, "window_strides": strides},
        )
        for name, size, strides in (
            ("larger than its window", 8, (1, 1)),
            ("as large as its window", 6, (1, 1)),
            ("smaller than its window", 5, (1, 1)),
            ("smaller than its window, stride", 5, (2, 2)),
        )
    },
    "depthwise, smaller than its window, features first": (
        _CONV,
        (16, 96, 6, 5),
        (96, 1, 7, 7),
        {"padding": "SAME", "feature_group_count": 96, "dimension_numbers": ("NCHW", "OIHW", "NCHW")},
    ),
    "depthwise, smaller than its window, one axis": (
        _CONV,
        (16, 20, 96),
        (31, 1, 96),
        {"padding": "SAME", "feature_group_count": 96},
    ),
    "groups, smaller than the window": (
        _CONV,
        (16, 6, 5, 96),
        (7, 7, 12, 96),
        {"padding": "SAME", "feature_group_count": 8},
    ),
    "window as large as the input": (_CONV, (16, 7, 7, 64), (7, 7, 64, 96), {"padding": "SAME"}),
    "window that covers the input": (_CONV, (32, 8, 7, 64), (8, 7, 64, 96), {"padding": "VALID"}),
    "one image, 1x1": (_CONV, (1, 28, 28, 64), (1, 1, 64, 96), {"padding": "VALID"}),
    "three axes": (_CONV, (2, 16, 16, 16, 32), (3, 3, 3, 32, 64), {"window_strides": (2, 2, 2), "padding": "SAME"}),
    "stride, features first": (
        _CONV,
        (64, 128, 28, 28),
        (128, 128, 3, 3),
        {"window_strides": (2, 2), "padding": "SAME", "dimension_numbers": ("NCHW", "OIHW", "NCHW")},
    ),
    "transposed, groups": (
        _CONV,
        (32, 16, 16, 4),
        (2, 2, 2, 32),
        {"lhs_dilation": (2, 2), "padding": ((1, 1), (1, 1)), "feature_group_count": 2},
    ),
    "transposed, depthwise": (
        _CONV,
        (32, 16, 16, 64),
        (4, 4, 1, 64),
        {"lhs_dilation": (2, 2), "padding": ((2, 2), (2, 2)), "feature_group_count": 64},
    ),
    "transposed": (_TRANSPOSED, (64, 28, 28, 128), (2, 2, 128, 128), {"strides": (2, 2), "padding": "VALID"}),
    "transposed, overlapping": (
        _TRANSPOSED,
        (64, 28, 28, 128),
        (4, 4, 128, 128),
        {"strides": (2, 2), "padding": "SAME"},
    ),
    "transposed, three axes": (_TRANSPOSED, (2, 8, 8, 8, 64), (2, 2, 2, 64, 32), {"strides": (2, 2, 2)}),
}


_MARKS = {"cuda": NEEDS_CUDA_MODULE}
# The platform, and the tables of preferences that are in force instead of those of this machine.
_TABLES = {
    "cpu with AVX-512": ("cpu", lambda: with_instruction_set("avx512")),
    "cpu without AVX-512": ("cpu", lambda: with_instruction_set("avx2")),
    "cpu, other preferences": ("cpu", with_other_preferences),
    "cuda": ("cuda", contextlib.nullcontext),
}


@pytest.fixture(scope="module", params=[pytest.param(name, marks=_MARKS.get(name, ())) for name in _TABLES])
def platform(request) -> Iterator[str]:
    """Each platform with each of its tables."""
    name, tables = _TABLES[request.param]
    with tables():
        jax.clear_caches()  # and with them the choices of other tables
        yield name
    jax.clear_caches()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("case", _CASES)
def test_the_gradients_of_a_layer_run_on_what_the_op_selects(platform, case, dtype):
    name, *shapes, arguments = _CASES[case]
    x, w = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    defaults = {_CONV: {"window_strides": (1,) * (x.ndim - 2), "padding": "VALID"}, _TRANSPOSED: {"padding": "SAME"}}

    def what_runs(library, wrap):
        def layer(x, w):
            layout = {"dimension_numbers": _LAYOUTS[x.ndim - 2]}
            return getattr(library, name)(x, w, **{**defaults[name], **layout, **arguments})

        def value_and_gradients(x, w):
            y, gradients = jax.vjp(layer, x, w)
            return y, gradients(jnp.sin(y))

        return _what_runs(wrap(value_and_gradients), platform, x, w)

    assert what_runs(jax.lax, jaxgrad.accelerate) == what_runs(jaxgrad, jax.jit)


def _what_runs(function, platform, *args):
    """The kernels of jaxgrad in a lowered program, the windows of its convolutions on XLA, and matrix products."""
    text = jax.jit(function).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    windows = re.findall(r"stablehlo.convolution.*window = \{(.*?), reverse.*feature_group_count = (\d+)", text)
    products = re.findall(r"stablehlo.dot_general", text)
    return set(re.findall(r"@(jaxgrad_(?:cpu|cuda|cudnn)_\w+)\(", text)) | set(windows) | set(products)
