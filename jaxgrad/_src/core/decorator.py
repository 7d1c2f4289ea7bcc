"""Context managers that decorate functions, methods and callable objects: their calls run inside the context."""

from __future__ import annotations

import copyreg
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from jaxgrad._src.core.reentrant import Reentrant

_Function = TypeVar("_Function", bound=Callable[..., Any])
_UNSUPPORTED: dict[Callable[[Any], bool], str] = {
    inspect.isclass: "a class",
    inspect.isgeneratorfunction: "a generator function",
    inspect.iscoroutinefunction: "a coroutine function",
    inspect.isasyncgenfunction: "a generator function",
}
_FUNCTIONS = types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial
_STAGES = "lower", "trace", "eval_shape"  # attributes of a function under `jax.jit` that trace it


class Decorator(Reentrant):
    """A context manager that is a decorator too. Two are equal if `__reduce__` returns the same.

    Attributes:
      name: what users call it.
    """

    name: str

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Decorator) and self.__reduce__() == other.__reduce__()

    def __hash__(self) -> int:
        return hash(self.__reduce__())

    def __call__(self, function: _Function) -> _Function:
        """Returns the function, decorated."""
        if not callable(function):
            raise TypeError(f"{self.name}: function must be callable, got {type(function).__name__}")
        if kind := unsupported_kind(function):
            raise TypeError(
                f"{self.name}: function must not be {kind}, got "
                f"{getattr(function, '__name__', function)}; decorate the functions that it calls"
            )
        return self._decorated(function)

    def _decorated(self, function: Any) -> Any:
        # Methods and partials stay what they are: nnx and `jaxgrad.report` look for the model that they bind.
        if isinstance(function, types.MethodType):
            _keep_decorators_of_copies()
            return types.MethodType(_decorated_once(self, function.__func__), function.__self__)
        if type(function) is functools.partial:
            partial = functools.partial(self._decorated(function.func), *function.args, **function.keywords)
            vars(partial).update(vars(function))
            return partial
        if not jax.tree_util.all_leaves([function]):
            return _DecoratedTree(self, function)
        if not isinstance(function, _FUNCTIONS) or any(callable(getattr(function, name, None)) for name in _STAGES):
            return _DecoratedObject(self, function)

        # flax marks methods by attributes. The attributes of an object belong to the object alone.
        @functools.wraps(function, updated=("__dict__",) if inspect.isfunction(function) else ())
        def decorated(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        decorated._jaxgrad_decorator = self  # type: ignore[attr-defined]
        return decorated


def decorator_of(function: Any) -> Decorator | None:
    """The decorator of jaxgrad whose result a function is, or wraps: `functools.wraps` copies the attribute."""
    found = inspect.getattr_static(function, "_jaxgrad_decorator", None)
    return found if isinstance(found, Decorator) and hasattr(function, "__wrapped__") else None


_methods: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()


def _decorated_once(decorator: Decorator, function: Any) -> Any:
    """Decorates the function of a method. While the result is in use, the same function gives the same result, so that
    a decorated method equals itself, as methods do."""
    decorated = decorator._decorated(function)
    return _methods.setdefault((decorator, function), decorated) if inspect.isfunction(function) else decorated


@functools.cache
def _keep_decorators_of_copies() -> None:
    """Registers how a decorated method is copied and pickled, by whichever pickler."""
    from multiprocessing.reduction import ForkingPickler

    copyreg.pickle(types.MethodType, _reduced_method)
    ForkingPickler.register(types.MethodType, _reduced_method)


def _reduced_method(method: types.MethodType) -> tuple[Any, ...]:
    """Python makes a copy of a method by the name that its object has for it, which is the method without decorator."""
    function, bound = method.__func__, method.__self__
    decorator = decorator_of(function)
    if decorator is None or inspect.getattr_static(type(bound), function.__name__, None) is function:
        return _reduced_by_others(method)
    return decorator._decorated, (types.MethodType(function.__wrapped__, bound),)  # type: ignore[attr-defined]


_reduced_by_others: Callable[[types.MethodType], Any] = copyreg.dispatch_table.get(
    types.MethodType, types.MethodType.__reduce__
)


def unsupported_kind(function: Callable[..., Any]) -> str | None:
    """What a function is, if it is one that cannot be decorated: a call of it makes an object and computes nothing."""
    function = function.__func__ if isinstance(function, types.MethodType) else function
    return next((kind for matches, kind in _UNSUPPORTED.items() if matches(function)), None)


class _DecoratedObject:
    """A decorated callable object, such as a model or a function under `jax.jit`. Its methods are decorated too.

    `__getattr__` decorates them when they are asked for. Were they attributes of the instance, JAX's transformations
    would copy them to their results.
    """

    def __init__(self, decorator: Decorator, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function, updated=())
        self._jaxgrad_decorator = decorator

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._jaxgrad_decorator:
            return self.__wrapped__(*args, **kwargs)

    def __repr__(self) -> str:
        return f"{self._jaxgrad_decorator.name}({self.__wrapped__!r})"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # such as the methods by which copies are made
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        attribute = getattr(self.__wrapped__, name)
        is_method = callable(attribute) and (name in _STAGES or _bound_object(attribute) is self.__wrapped__)
        return (
            self._jaxgrad_decorator._decorated(attribute)
            if is_method and not unsupported_kind(attribute)
            else attribute
        )

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.__wrapped__)})

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute of the object, such as a layer of a model. Some names belong to the wrapper."""
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
    return name.startswith("__") or name == "_jaxgrad_decorator"


def _bound_object(method: Any) -> Any:
    """The object of a method; None if it is no method. That of a jitted method may be the first argument of a partial.

    Methods of equinox have other types. Their attributes are read without code of the object.
    """
    if isinstance(method, types.MethodType):
        return method.__self__
    args = method.args if isinstance(method, functools.partial) else inspect.getattr_static(method, "args", ())
    if isinstance(args, tuple) and args:
        return args[0]
    return inspect.getattr_static(method, "__self__", None)


@jax.tree_util.register_pytree_with_keys_class
class _DecoratedTree(_DecoratedObject):
    """A decorated object that is a pytree, such as a module of equinox. It is a pytree with the same leaves."""

    def tree_flatten_with_keys(self) -> tuple[Any, Decorator]:
        return [(jax.tree_util.GetAttrKey("__wrapped__"), self.__wrapped__)], self._jaxgrad_decorator

    @classmethod
    def tree_unflatten(cls, decorator: Decorator, children: Sequence[Any]) -> _DecoratedTree:
        return cls(decorator, *children)
