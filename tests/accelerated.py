"""A small network of `jax.lax`, and which passes of jaxgrad a program holds."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from tolerances import assert_close

PASSES = {"forward", "input_gradient", "weight_gradient"}
_NCHW = ("NCHW", "OIHW", "NCHW")


def network(x, w_down, w_up):
    """A convolution with groups and strides, and a transposed one. oneDNN and cuDNN have kernels for all passes."""
    y = jnp.tanh(lax.conv_general_dilated(x, w_down, (2, 1), ((1, 0), (0, 2)), feature_group_count=2))
    return lax.conv_transpose(y, w_up, (1, 2), "SAME", dimension_numbers=_NCHW)


def network_arrays(dtype: Any = np.float32) -> tuple[np.ndarray, ...]:
    """Arguments of `network`."""
    rng = np.random.default_rng(0)
    shapes = (2, 4, 6, 5), (6, 2, 3, 2), (3, 6, 3, 3)
    return tuple((rng.normal(size=shape) / 2).astype(dtype) for shape in shapes)


def convolve(x, w):
    return lax.conv(x, w, (1, 1), "SAME")


def convolve_arrays(dtype: Any = np.float32) -> tuple[np.ndarray, ...]:
    """Arguments of `convolve`: enough multiplications for jaxgrad to select oneDNN for every pass."""
    rng = np.random.default_rng(1)
    return tuple(rng.normal(size=shape).astype(dtype) / 2 for shape in ((2, 3, 9, 7), (4, 3, 3, 3)))


def passes(program: Any) -> Counter[str]:
    """The calls of the passes' kernels in a program, lowered or compiled; "xla" for the convolutions on XLA.

    A lowered program shares its functions: equal calls count as one.
    """
    text = program if isinstance(program, str) else program.as_text()
    found = Counter(re.findall(r"custom_call(?: @|_target=\")jaxgrad_(?:onednn|cudnn)_conv_(\w+)", text))
    found["xla"] = len(re.findall(r"stablehlo\.convolution| convolution\(", text))
    return +found


def assert_passes(program: Any, expected: set[str]) -> None:
    """Compares the passes in a program."""
    assert set(passes(program)) == expected


def close(found: Any, expected: Any, dtype: str = "float32", terms: int = 100, **settings: Any) -> None:
    """Compares trees of arrays. `settings` are `backend` and `rounding` of `assert_close`."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: assert_close(a, b, dtype=dtype, terms=terms, **settings), found, expected)
