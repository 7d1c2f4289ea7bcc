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

    Example:
      >>> call, arrays = function_of_arrays(lambda x, power: x**power, (jax.numpy.arange(3), 2), {})
      >>> [array.shape for array in arrays]  # of x; the power is constant
      [(3,)]
      >>> [array.tolist() for array in call(*arrays)]  # the result, and x after the call
      [[0, 1, 4], [0, 1, 2]]
    """
    called, models, constants = _unbound(function)
    args = *models, *args
    kwargs = {**{name: value for name, value in constants.items() if _is_model(value)}, **kwargs}
    leaves, tree = jax.tree.flatten((called, args, kwargs))
    is_array = [isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)) for leaf in leaves]

    def call(*arrays: Any) -> list[jax.Array]:
        given = iter(arrays)
        both = [next(given) if here else leaf for leaf, here in zip(leaves, is_array, strict=True)]
        called, args, kwargs = jax.tree.unflatten(tree, both)
        result = called(*args, **{**constants, **kwargs})
        return [leaf for leaf in jax.tree.leaves((result, called, args, kwargs)) if isinstance(leaf, jax.Array)]

    return call, [leaf for leaf, here in zip(leaves, is_array, strict=True) if here]


def _unbound(called: Any) -> tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]:
    """Returns the function in methods and partials, the models that they bind, which are its first arguments, and the
    keyword arguments that they bind."""
    if isinstance(called, types.MethodType):
        function, models, keywords = _unbound(called.__func__)
        return function, (*models, called.__self__), keywords
    if type(called) is functools.partial:  # the method of an object that nnx.jit compiles is one of these
        function, models, keywords = _unbound(called.func)
        own = [value for value in called.args if _is_model(value)]
        if len(own) < len(called.args):
            function = _with_constants(function, len(models), called.args)
        return function, (*models, *own), {**keywords, **called.keywords}
    return called, (), {}


def _with_constants(function: Callable[..., Any], position: int, bound: Sequence[Any]) -> Callable[..., Any]:
    """A function of the models in `bound`, which binds the other values. They are arguments from a position on."""
    are_models = [_is_model(value) for value in bound]

    def call(*args: Any, **kwargs: Any) -> Any:
        first, later = args[:position], iter(args[position:])
        both = [next(later) if is_model else value for is_model, value in zip(are_models, bound, strict=True)]
        return function(*first, *both, *later, **kwargs)

    return call


def _is_model(value: Any) -> bool:
    """Whether it is a pytree of a class of its own. Arrays and containers that a function binds may be static."""
    return not jax.tree_util.all_leaves([value]) and not isinstance(value, (tuple, list, dict))
