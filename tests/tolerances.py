"""Tolerances: how far a result may lie from the float64 reference of the same rounded inputs.

Errors are relative to the largest value of the array, or to 1: sums of many terms of both signs leave small values
with the absolute error of large ones. The inputs are drawn such that values and gradients are near 1, or above it
where many steps are summed. A zeroed gradient, a swapped gate or a missing bias causes an error of the order of the
largest value, far above a tolerance of a few eps.
"""

from __future__ import annotations

from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

DTYPES = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


def input_dtype(name: str) -> np.dtype:
    """The dtype of the inputs of a test. Skips tests of float64 where JAX has 32-bit types (`--jax-defaults`)."""
    if name == "float64" and not jax.config.jax_enable_x64:
        pytest.skip("float64 needs JAX's 64-bit types")
    return DTYPES[name]


EPS = {name: float(np.finfo(dtype).eps) if dtype.kind == "f" else 2.0**-7 for name, dtype in DTYPES.items()}
EPS["tensorfloat32"] = EPS["chained tensorfloat32"] = 2.0**-10  # to which products may round float32 operands

# dtype: (a, s); the tolerance is (a + s * sqrt(terms)) * eps, where `terms` is the length of the longest sum.
_FACTORS = {
    # Arithmetic in the type itself. The recurrence and the activations make a few roundings a step, of which the gates
    # forget the older ones; a slope such as 1 - n * n loses a few more where n is near 1: 8. The rounding errors of a
    # sum grow like the root of its length. Measured in 400 random calls of the GRU: up to 0.6 of this.
    "float32": (8.0, 1.0),
    "float64": (8.0, 1.0),
    # Storage only, arithmetic in float32: half an eps for rounding the result, and as much again in each product that
    # reads a rounded state or a rounded gradient of a gate; these do not grow with the length. Measured: up to 0.9.
    "bfloat16": (2.0, 0.0),
    "float16": (2.0, 0.0),
    # Every operand of every product is rounded, the inputs and weights too, on some GPUs towards zero: 4.
    "tensorfloat32": (4.0, 0.0),
    # The same, where products read the results of other products through nonlinear functions, in derivatives up to the
    # second. Measured on a CPU with operands cut to the 10 bits of TF32: up to 0.5 of this.
    "chained tensorfloat32": (32.0, 0.0),
}

# Of jaxgrad's CUDA kernels, where they differ. The GRU has faster activations, with errors of a few eps of float32: 16.
_CUDA_FACTORS = {"float32": (16.0, 1.0)}


def rounds_products(backend: Any) -> bool:
    """Whether products round float32 operands to TF32: on a GPU at JAX's default precision (`--jax-defaults`).

    Reads JAX's configuration: a test that changes the precision compares under the same precision.
    """
    return backend is not None and backend.platform == "gpu" and jax.config.jax_default_matmul_precision is None


def chained_rounding(backend: Any) -> str | None:
    """The `rounding` of `assert_close` where products of `backend` read the results of other products."""
    return "chained tensorfloat32" if rounds_products(backend) else None


def _smallest_scale(elements: int, terms: int) -> float:
    """Where an array has few elements, all may be small by cancellation; their terms and partial sums are not."""
    return 1.0 if elements > 4 else max(1.0, terms**0.5 / 2)


def tolerance(dtype: str, expected: np.ndarray, terms: int, backend: Any = None) -> float:
    """The absolute error allowed in every element of an array, which `backend` computed."""
    if dtype == "float32" and rounds_products(backend):
        dtype = "tensorfloat32"
    own = backend is not None and backend.implementation == "cuda"
    a, s = _CUDA_FACTORS[dtype] if own and dtype in _CUDA_FACTORS else _FACTORS[dtype]
    finite = np.abs(expected[np.isfinite(expected)])
    return (a + s * terms**0.5) * EPS[dtype] * max(finite.max(initial=0.0), _smallest_scale(expected.size, terms))


def assert_close(
    actual: Any,
    expected: Any,
    *,
    dtype: str,
    terms: int,
    name: str = "",
    backend: Any = None,
    rounding: str | None = None,
) -> None:
    """Compares dtype, shape and values. NaN matches NaN; infinity matches infinity of the same sign.

    `backend` is that of an op that computes products; None is for other ops. `rounding` is the type that products round
    float32 operands to, where it does not follow from `backend` and JAX's configuration. Other dtypes ignore it.
    """
    actual, expected = np.asarray(actual), np.asarray(expected).astype(np.float64)
    assert actual.dtype == DTYPES[dtype], f"{name} has the dtype {actual.dtype}"
    assert actual.shape == expected.shape, f"{name} has the shape {actual.shape}, not {expected.shape}"
    atol = tolerance(rounding if rounding and dtype == "float32" else dtype, expected, terms, backend)
    np.testing.assert_allclose(actual.astype(np.float64), expected, rtol=0, atol=atol, err_msg=name)


def assert_results_close(
    actual: tuple, expected: tuple, *, dtype: str, terms: int, backend: Any = None, rounding: str | None = None
) -> None:
    """Compares `(y, y_h, gradients)`. Gradients that are None in `actual` are not compared."""
    settings: dict[str, Any] = {"dtype": dtype, "terms": terms, "backend": backend, "rounding": rounding}
    assert_close(actual[0], expected[0], name="y", **settings)
    assert_close(actual[1], expected[1], name="y_h", **settings)
    for name, gradient in actual[2]._asdict().items():
        if gradient is not None:
            found = getattr(expected[2], name)
            assert_close(gradient, found, name=f"the gradient of {name}", **settings)
