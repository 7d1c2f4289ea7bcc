"""References for the convolutions: `jax.lax` in float64, and sums over the window in NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from backends import float64_on_cpu
from conv_cases import ConvCase, ConvInputs
from conv_running import Result, run
from jax import lax


def with_bias(op: Callable[..., Any], feature_axis: int) -> Callable[..., Any]:
    """`op(lhs, rhs)` plus a bias along `feature_axis` of the result."""

    def call(lhs, rhs, bias):
        y = op(lhs, rhs)
        return y if bias is None else y + lax.expand_dims(bias, [a for a in range(y.ndim) if a != feature_axis])

    return call


def lax_conv(case: ConvCase) -> Callable[..., Any]:
    def call(lhs, rhs):
        settings = case.settings
        if isinstance(settings["padding"], tuple) and min(min(sides) for sides in settings["padding"]) < 0:
            # Cropped beforehand: XLA has faults with negative padding (docs/transformations.md).
            config = [(0, 0, 0)] * lhs.ndim
            spread = settings.pop("lhs_dilation") or (1,) * case.n
            for axis, sides, dilation in zip(case.numbers.lhs_spec[2:], settings["padding"], spread, strict=True):
                config[axis] = (*sides, dilation - 1)
            lhs = lax.pad(lhs, np.zeros((), lhs.dtype), config)
            settings["padding"] = ((0, 0),) * case.n
        return lax.conv_general_dilated(lhs, rhs, **settings)

    return with_bias(call, case.numbers.out_spec[1])


def in_float64(op: Callable[..., Any], inputs: ConvInputs, dy: np.ndarray) -> Result:
    """`op` and its gradients in float64, at the same rounded inputs."""
    with float64_on_cpu():
        wide = [None if a is None else np.asarray(a, np.float64) for a in (*inputs, dy)]
        return run(op, ConvInputs(*wide[:3]), wide[3])


def numpy_conv(lhs, rhs, strides, padding, rhs_dilation, groups):
    """A convolution of NCHW and OIHW arrays as a sum over the window, in NumPy."""
    return _numpy_taps(lhs, rhs.shape, strides, padding, rhs_dilation, groups, rhs=rhs)


def numpy_weight_gradient(lhs, rhs_shape, dy, strides, padding, rhs_dilation, groups):
    return _numpy_taps(lhs, rhs_shape, strides, padding, rhs_dilation, groups, dy=dy)


def _numpy_taps(lhs, rhs_shape, strides, padding, rhs_dilation, groups, rhs=None, dy=None):
    batch, features, *_ = lhs.shape
    out, _, *window = rhs_shape
    lhs = np.pad(lhs, [(0, 0), (0, 0), *padding])
    sizes = [
        (size - (k - 1) * d - 1) // s + 1
        for size, k, s, d in zip(lhs.shape[2:], window, strides, rhs_dilation, strict=True)
    ]
    lhs = lhs.reshape(batch, groups, features // groups, *lhs.shape[2:])
    y = np.zeros((batch, groups, out // groups, *sizes))
    dw = np.zeros((groups, out // groups, *rhs_shape[1:]))
    for tap in itertools.product(*map(range, window)):
        steps = zip(tap, rhs_dilation, sizes, strides, strict=True)
        met = lhs[(..., *(slice(o * d, o * d + (m - 1) * s + 1, s) for o, d, m, s in steps))]
        if rhs is not None:
            w = rhs.reshape(groups, out // groups, *rhs_shape[1:])[(..., *tap)]
            y += np.einsum("goi,ngi...->ngo...", w, met)
        if dy is not None:
            places = (batch, groups, -1, int(np.prod(sizes)))
            dw[(..., *tap)] = np.einsum("ngos,ngis->goi", dy.reshape(places), met.reshape(places))
    return y.reshape(batch, out, *sizes) if dy is None else dw.reshape(rhs_shape)
