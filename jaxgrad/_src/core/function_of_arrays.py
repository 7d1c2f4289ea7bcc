"""A call of any function as a function of its arrays alone."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np


def function_of_arrays(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., list[jax.Array]], list[Any]]:
    """Returns a function of arrays, and its arguments: the arrays in the arguments of a call, or their shapes.

    A function that is a pytree, such as a model, the object of a bound method and what `functools.partial` binds count
    as arguments. The result is a function that returns the arrays in the result of the call, and in the arguments after
    it: a call may change objects in place, as steps of flax.nnx do. Everything else in the arguments, such as Python
    numbers, NumPy scalars and the functions in a model, is constant.
    """
    called: Any = function
    if isinstance(called, types.MethodType):
        called, args = called.__func__, (called.__self__, *args)
    elif isinstance(called, functools.partial):  # as flax binds the methods that nnx.jit compiles
        called, args, kwargs = called.func, (*called.args, *args), {**called.keywords, **kwargs}
    leaves, tree = jax.tree.flatten((called, args, kwargs))
    is_array = [isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)) for leaf in leaves]

    def call(*arrays: Any) -> list[jax.Array]:
        given = iter(arrays)
        both = [next(given) if here else leaf for leaf, here in zip(leaves, is_array, strict=True)]
        called, args, kwargs = jax.tree.unflatten(tree, both)
        result = called(*args, **kwargs)
        return [leaf for leaf in jax.tree.leaves((result, called, args, kwargs)) if isinstance(leaf, jax.Array)]

    return call, [leaf for leaf, here in zip(leaves, is_array, strict=True) if here]
