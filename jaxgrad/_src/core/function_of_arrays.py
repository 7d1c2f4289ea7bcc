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

    A function that is a pytree, such as a model, and the models that methods and `functools.partial` bind count as
    arguments. The result is a function that returns the arrays in the result of the call, and in the arguments after
    it: a call may change objects in place, as steps of flax.nnx do. Everything else in the arguments, such as Python
    numbers, NumPy scalars and the functions in a model, is constant, and so are other bound values.
    """
    called, args, constants = _unbound(function, args)
    leaves, tree = jax.tree.flatten((called, args, kwargs))
    is_array = [isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)) for leaf in leaves]

    def call(*arrays: Any) -> list[jax.Array]:
        given = iter(arrays)
        both = [next(given) if here else leaf for leaf, here in zip(leaves, is_array, strict=True)]
        called, args, kwargs = jax.tree.unflatten(tree, both)
        result = called(*args, **{**constants, **kwargs})
        return [leaf for leaf in jax.tree.leaves((result, called, args, kwargs)) if isinstance(leaf, jax.Array)]

    return call, [leaf for leaf, here in zip(leaves, is_array, strict=True) if here]


def _unbound(called: Any, args: Sequence[Any]) -> tuple[Any, Sequence[Any], dict[str, Any]]:
    """Returns the function, the arguments after the models that it binds, and the keyword arguments that it binds."""
    keywords: dict[str, Any] = {}
    while True:
        if isinstance(called, types.MethodType):
            called, args = called.__func__, (called.__self__, *args)
        elif type(called) is functools.partial and all(map(_is_model, called.args)):
            # The method of an object that nnx.jit compiles is one of these.
            called, args, keywords = called.func, (*called.args, *args), {**called.keywords, **keywords}
        else:
            return called, args, keywords


def _is_model(value: Any) -> bool:
    """Whether it is a pytree of a class of its own. Arrays and containers that a function binds may be static."""
    return not jax.tree_util.all_leaves([value]) and not isinstance(value, (tuple, list, dict))
