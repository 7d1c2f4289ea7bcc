"""GRU weights for the tests of `jaxgrad.convert` and `jaxgrad.nn`, and how trees are compared."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

I, H, T, B = 5, 4, 6, 3  # noqa: E741
STRUCTURES = {
    "two biases": (12, 12),
    "one bias and that of n": (12, 4),
    "one bias": (12, None),
    "no bias": (None, None),
}


def normal(*shape: int, seed: int = 0, dtype: Any = np.float64) -> np.ndarray:
    return (np.random.default_rng([seed, *shape]).normal(size=shape) / 2).astype(dtype)


def random_like(tree: Any, seed: int = 0) -> Any:
    """Arrays of the same shapes and dtypes. Frameworks initialize biases with zeros, which hides exchanged ones."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(
        structure, [jnp.asarray(normal(*a.shape, seed=seed + i), a.dtype) for i, a in enumerate(leaves)]
    )


def _as_numpy(array: Any) -> np.ndarray:
    is_key = isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if is_key else array)


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Trees with the same keys, dtypes, shapes and bits."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, e = map(_as_numpy, (a, e))
        assert (a.dtype, a.shape) == (e.dtype, e.shape)
        assert a.tobytes() == e.tobytes()


def assert_trees_close(actual: Any, expected: Any, tolerance: float = 1e-11) -> None:
    """Trees with the same keys and dtypes. The tolerance is relative to the largest element of an array, or to 1."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype
        e = np.asarray(e, np.float64)
        np.testing.assert_allclose(np.asarray(a, np.float64), e, rtol=0, atol=tolerance * np.abs(e).max(initial=1))
