"""`jaxgrad.accelerate`: runs the convolutions and poolings of any JAX function on jaxgrad's passes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, overload

from jaxgrad._src.accelerate.lowering import installed_or_warn
from jaxgrad._src.choice.op import check_implementation
from jaxgrad._src.core import marks
from jaxgrad._src.core.decorator import Decorator

_Function = TypeVar("_Function", bound=Callable[..., Any])


@overload
def accelerate(function: _Function, /, *, implementation: str | None = None) -> _Function: ...
@overload
def accelerate(function: None = None, /, *, implementation: str | None = None) -> Acceleration: ...


def accelerate(function: Any = None, /, *, implementation: str | None = None) -> Any:
    """Runs the convolutions and poolings of a JAX function on jaxgrad's kernels; the function stays as it is.

    A decorator and a context manager. Every convolution that is traced inside, by `jax.lax`, flax, equinox, Haiku,
    Keras or any other library, is computed by the fastest implementation known, and so are the convolutions that
    differentiation and `vmap` make of it, wherever they are applied. The same holds for `jax.lax.reduce_window` with a
    maximum or a sum, and the gradient of the maximum. XLA runs some convolutions in another form than JAX writes. What
    has no faster implementation, and all other operations, are compiled as without `accelerate`. The input of a
    convolution that XLA miscompiles is padded in a separate operation.

    The derivatives are those of JAX, so forward mode, Hessians and the policies of `jax.checkpoint` work as they do
    without `accelerate`. `accelerate` may be applied before or after `jax.jit` and `jax.grad`. Functions under
    `jax.jit` that were traced without it are traced again.

    Args:
      function: the function, which may be one of `jax.jit`. Without it, the result is a context manager, which is a
        decorator too.
      implementation: None for the fastest implementation. "onednn", "cudnn", "cpu" or "cuda" allows only this one, and
        uses it wherever it supports a convolution or pooling, whether or not it is the fastest. "cpu" and "cuda" are
        jaxgrad's own kernels, for depthwise convolutions and poolings. "xla" switches acceleration off. The innermost
        `accelerate` around a convolution applies to it.

    Returns:
      The accelerated function, or the context manager. Of an object that can be called, such as a model, the methods
      are accelerated too; its other attributes, such as submodules, are those of the object. An object that is a
      pytree, such as a module of equinox, stays a pytree with the same leaves.

    Raises:
      TypeError: function is not callable, or it is a class, a generator function or a coroutine function.
      ValueError: implementation is unknown.

    Warns:
      RuntimeWarning: this release of JAX is not supported. Functions then run as without `accelerate`.

    `jaxgrad.report` lists the convolutions and poolings of a function, what each runs on, and why. `jax.export` of an
    accelerated function requires `disabled_checks=jaxgrad.export_disabled_checks()`. A program for an abstract mesh
    with automatic axes must be lowered without acceleration.

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


class Acceleration(Decorator):
    """The context manager of `jaxgrad.accelerate`."""

    name = "jaxgrad.accelerate"

    def __init__(self, implementation: str | None) -> None:
        super().__init__()
        self._implementation = implementation

    def __reduce__(self) -> tuple[Any, ...]:
        return Acceleration, (self._implementation,)

    def _new_context(self) -> AbstractContextManager[None]:
        if not installed_or_warn():
            return nullcontext()
        return marks.marked(marks.AUTOMATIC if self._implementation is None else self._implementation)
