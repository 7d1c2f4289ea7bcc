"""`jaxgrad.accelerate`: runs the convolutions of any JAX function on jaxgrad's passes."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, overload

import jax

from jaxgrad._src.accelerate.lowering import installed_or_warn
from jaxgrad._src.core import marks
from jaxgrad._src.core.op import check_implementation
from jaxgrad._src.core.reentrant import Reentrant

_Function = TypeVar("_Function", bound=Callable[..., Any])
_UNSUPPORTED: dict[Callable[[Any], bool], str] = {
    inspect.isclass: "a class",
    inspect.isgeneratorfunction: "a generator function",
    inspect.iscoroutinefunction: "a coroutine function",
    inspect.isasyncgenfunction: "a generator function",
}
_FUNCTIONS = types.FunctionType, types.BuiltinFunctionType, functools.partial


@overload
def accelerate(function: _Function, /, *, implementation: str | None = None) -> _Function: ...
@overload
def accelerate(function: None = None, /, *, implementation: str | None = None) -> Acceleration: ...


def accelerate(function: Any = None, /, *, implementation: str | None = None) -> Any:
    """Runs the convolutions of a JAX function on jaxgrad's kernels; the function stays as it is.

    A decorator and a context manager. Every convolution that is traced inside, by `jax.lax`, flax, equinox, Haiku,
    Keras or any other library, is computed by the fastest implementation known, and so are the convolutions that
    differentiation and `vmap` make of it, wherever they are applied. Convolutions without a faster implementation, and
    all other operations, are compiled as without `accelerate`. Those that XLA miscompiles are padded before.

    The derivatives are those of JAX, so forward mode, Hessians and the policies of `jax.checkpoint` work as they do
    without `accelerate`. `accelerate` may be applied before or after `jax.jit` and `jax.grad`. Functions under
    `jax.jit` that were traced without it are traced again.

    Args:
      function: the function, which may be one of `jax.jit`. Without it, the result is a context manager, which is a
        decorator too.
      implementation: None for the fastest implementation. "cpu" (oneDNN, or jaxgrad's CPU kernels for depthwise
        convolutions), "onednn" or "depthwise" (one of these alone), "cudnn" or "cuda" allows only this one, and uses it
        wherever it supports a convolution, whether or not it is the fastest. "xla" switches acceleration off. The
        innermost `accelerate` around a convolution applies to it.

    Returns:
      The accelerated function, or the context manager. An object that can be called, such as a model, keeps its
      attributes, and its methods are accelerated too. If it is a pytree, such as a module of equinox, it stays a pytree
      with the same leaves.

    Raises:
      TypeError: function is not callable, or it is a class, a generator function or a coroutine function.
      ValueError: implementation is unknown.

    Warns:
      RuntimeWarning: this release of JAX is not supported. Functions then run as without `accelerate`.

    `jaxgrad.report` lists the convolutions of a function, what each runs on, and why. `jax.export` of an accelerated
    function requires `disabled_checks=jaxgrad.export_disabled_checks()`. A program for an abstract mesh with
    automatic axes must be lowered without acceleration.

    Examples:
      >>> @jaxgrad.accelerate
      ... def loss(w, x):
      ...   return jnp.sum(jax.lax.conv(x, w, (1, 1), "SAME") ** 2)
      >>> x, w = jnp.ones((8, 3, 32, 32)), jnp.ones((16, 3, 3, 3))
      >>> gradient = jax.jit(jax.grad(loss))(w, x)
      >>> with jaxgrad.accelerate():
      ...   y = jax.lax.conv(x, w, (1, 1), "SAME")
    """
    check_implementation("jaxgrad.accelerate", implementation)
    acceleration = Acceleration(implementation)
    return acceleration if function is None else acceleration(function)


class Acceleration(Reentrant):
    """The context manager of `jaxgrad.accelerate`."""

    def __init__(self, implementation: str | None) -> None:
        super().__init__()
        self._implementation = implementation
        self._mark = marks.AUTOMATIC if implementation is None else implementation

    def __reduce__(self) -> tuple[Any, ...]:
        return Acceleration, (self._implementation,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Acceleration) and self._mark == other._mark

    def __hash__(self) -> int:
        return hash(self._mark)

    def __call__(self, function: _Function) -> _Function:
        """Returns the function, accelerated."""
        if not callable(function):
            raise TypeError(f"jaxgrad.accelerate: function must be callable, got {type(function).__name__}")
        if kind := _unsupported(function):
            raise TypeError(
                f"jaxgrad.accelerate: function must not be {kind}, got {function.__name__}; "
                "accelerate the functions that it calls"
            )
        if isinstance(function, types.MethodType):  # stays one: frameworks look for the model that it binds
            return types.MethodType(self(function.__func__), function.__self__)  # type: ignore[return-value]
        if not jax.tree_util.all_leaves([function]):
            return _AcceleratedTree(self, function)  # type: ignore[return-value]
        if not isinstance(function, _FUNCTIONS):
            return _AcceleratedObject(self, function)  # type: ignore[return-value]

        # flax marks methods by attributes. The attributes of an object belong to the object alone.
        @functools.wraps(function, updated=("__dict__",) if inspect.isfunction(function) else ())
        def accelerated(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return accelerated  # type: ignore[return-value]

    def _new_context(self) -> AbstractContextManager[None]:
        return marks.marked(self._mark) if installed_or_warn() else nullcontext()


def _unsupported(function: Callable[..., Any]) -> str | None:
    return next((kind for matches, kind in _UNSUPPORTED.items() if matches(function)), None)


class _AcceleratedObject:
    """An accelerated callable object, such as a model or a function under `jax.jit`. Its methods are accelerated too.

    They are no attributes of the instance: JAX's transformations copy those to their results.
    """

    def __init__(self, acceleration: Acceleration, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function, updated=())
        self._acceleration = acceleration

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._acceleration:
            return self.__wrapped__(*args, **kwargs)

    def __repr__(self) -> str:
        return f"jaxgrad.accelerate({self.__wrapped__!r})"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # such as the methods by which copies are made
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        attribute = getattr(self.__wrapped__, name)
        is_method = getattr(attribute, "__self__", None) is self.__wrapped__ and callable(attribute)
        return self._acceleration(attribute) if is_method and not _unsupported(attribute) else attribute

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute of the function, such as a layer of a model. Some names belong to the wrapper."""
        if _is_of_wrapper(name):
            super().__setattr__(name, value)
        else:
            setattr(self.__wrapped__, name, value)

    def __delattr__(self, name: str) -> None:
        if _is_of_wrapper(name):
            super().__delattr__(name)
        else:
            delattr(self.__wrapped__, name)


def _is_of_wrapper(name: str) -> bool:
    return name.startswith("__") or name == "_acceleration"


@jax.tree_util.register_pytree_with_keys_class
class _AcceleratedTree(_AcceleratedObject):
    """An accelerated function that is a pytree, such as a module of equinox. It is a pytree with the same leaves."""

    def tree_flatten_with_keys(self) -> tuple[Any, Acceleration]:
        return [(jax.tree_util.GetAttrKey("__wrapped__"), self.__wrapped__)], self._acceleration

    @classmethod
    def tree_unflatten(cls, acceleration: Acceleration, children: Sequence[Any]) -> _AcceleratedTree:
        return cls(acceleration, *children)
