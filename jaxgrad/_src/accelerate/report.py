"""`jaxgrad.report`: the convolutions of a program, and what each of them runs on."""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from jaxgrad._src.accelerate import jax_internals
from jaxgrad._src.accelerate.lowering import install
from jaxgrad._src.conv.equation import plan_equation
from jaxgrad._src.core import checks, marks
from jaxgrad._src.core.op import public_platform

# A convolution belongs to the innermost line outside these packages.
_LIBRARIES = ("jax", "jaxlib", "jaxgrad", "flax", "haiku", "equinox", "jaxtyping", "keras", "optax")


@dataclasses.dataclass(frozen=True)
class Convolution:
    """Convolutions of a program that are alike.

    Attributes:
      source: the line that calls them: file, line and function.
      lhs, rhs, result: dtype, shape and layout, such as "f32[8,32,32,3] NHWC".
      pass_name: "forward", "input_gradient" or "weight_gradient": what the convolution computes. Empty if no pass of
        jaxgrad does.
      implementation: what it runs on, as in `jaxgrad.Explanation`.
      reason: why, in one sentence.
      count: the number of equations. The body of a loop counts once.
    """

    source: str
    lhs: str
    rhs: str
    result: str
    pass_name: str
    implementation: str
    reason: str
    count: int = 1


@dataclasses.dataclass(frozen=True)
class Report:
    """The convolutions of a program. Prints as a table; `dataclasses.asdict` returns it as a dictionary.

    Attributes:
      platform: "cpu" or "gpu".
      convolutions: in the order of the program.
    """

    platform: str
    convolutions: tuple[Convolution, ...]

    @property
    def counts(self) -> dict[str, int]:
        """The number of convolutions by implementation."""
        found: Counter[str] = Counter()
        for convolution in self.convolutions:
            found[convolution.implementation] += convolution.count
        return dict(found)

    def __str__(self) -> str:
        header = ("source", "lhs", "rhs", "result", "pass", "runs on", "count", "why")
        rows = [
            (c.source, c.lhs, c.rhs, c.result, c.pass_name or "-", c.implementation, str(c.count), c.reason)
            for c in self.convolutions
        ]
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (header, *rows)]
        total = sum(self.counts.values())
        left = self.counts.get("xla", 0)
        return "\n".join([*lines, f"{total} convolutions on {self.platform}, {left} of them on XLA"])


def report(function: Callable[..., Any], *args: Any, platform: str | None = None, **kwargs: Any) -> Report:
    """Returns the convolutions of a function, what each of them runs on, and why. Runs nothing.

    Args:
      function: the function, accelerated or not, which may be one of `jax.jit`.
      *args: the arguments of a call. Arrays may be `jax.ShapeDtypeStruct`.
      platform: "cpu" or "gpu"; by default the platform of JAX's default device.
      **kwargs: the keyword arguments of the call.

    Returns:
      A `Report`. It has the convolutions of `jax.lax`, also those that differentiation and `vmap` have made. Over a
      mesh, shapes are those of whole arrays.

    Raises:
      TypeError: function is not callable.
      ValueError: platform is unknown.

    Example:
      >>> @jaxgrad.accelerate
      ... def loss(w, x):
      ...   return jnp.sum(jax.lax.conv(x, w, (1, 1), "SAME") ** 2)
      >>> w, x = jnp.ones((64, 64, 3, 3)), jnp.ones((8, 64, 32, 32))
      >>> found = jaxgrad.report(jax.grad(loss), w, x, platform="cpu")
      >>> [(c.pass_name, c.implementation) for c in found.convolutions]
      [('forward', 'cpu'), ('weight_gradient', 'cpu')]
    """
    if not callable(function):
        raise TypeError(f"jaxgrad.report: function must be callable, got {type(function).__name__}")
    checks.check_choice("jaxgrad.report", "platform", platform, (None, "cpu", "gpu"))
    platform = platform or public_platform(jax.default_backend())
    problem = install()
    found: Counter[Convolution] = Counter()
    for equation in jax_internals.equations(_jaxpr(function, args, kwargs)):
        if equation.primitive is lax.conv_general_dilated_p:
            found[_convolution(equation, platform, problem)] += 1
    return Report(platform, tuple(dataclasses.replace(c, count=count) for c, count in found.items()))


def _jaxpr(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    # A bound method takes `trace` from the function, which does not know the object. flax.nnx has stages without jaxpr.
    if hasattr(function, "trace") and not inspect.ismethod(function):
        traced = function.trace(*args, **kwargs)
        if hasattr(traced, "jaxpr"):
            return traced.jaxpr.jaxpr
    leaves, tree = jax.tree.flatten((args, kwargs))
    is_array = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]

    def call(*arrays: Any) -> Any:
        given = iter(arrays)
        both = [next(given) if here else leaf for leaf, here in zip(leaves, is_array, strict=True)]
        args, kwargs = jax.tree.unflatten(tree, both)
        return jax.tree.leaves(function(*args, **kwargs))

    arrays = [leaf for leaf, here in zip(leaves, is_array, strict=True) if here]
    return jax.jit(call).trace(*arrays).jaxpr.jaxpr


def _convolution(equation: Any, platform: str, problem: str) -> Convolution:
    parameters = equation.params
    avals = [variable.aval for variable in (*equation.invars, *equation.outvars)]
    mark = jax_internals.mark_of_equation(equation)
    if problem:
        pass_name, implementation, reason = "", "xla", problem
    elif mark is None:
        pass_name, implementation, reason = "", "xla", "not accelerated"
    elif mark == marks.EXEMPT:
        pass_name, implementation, reason = "", "xla", "acceleration is switched off"
    else:
        allowed = None if mark == marks.AUTOMATIC else mark
        plan = plan_equation(parameters, avals, "cuda" if platform == "gpu" else platform, allowed)
        pass_name, implementation, reason = plan.pass_name, plan.implementation, plan.reason
    dn = parameters["dimension_numbers"]
    letters = zip(avals, (dn.lhs_spec, dn.rhs_spec, dn.out_spec), ("NC", "OI", "NC"), strict=True)
    lhs, rhs, result = (_described(*names) for names in letters)
    return Convolution(_source(equation), lhs, rhs, result, pass_name, implementation, reason)


def _described(aval: Any, spec: tuple[int, ...], leading: str) -> str:
    names = dict(zip(spec, leading + "DHW"[5 - len(spec) :] if len(spec) <= 5 else leading, strict=False))
    layout = "".join(names.get(axis, "?") for axis in range(len(spec)))
    return f"{aval.str_short(short_dtypes=True).split('@')[0]} {layout}"


def _source(equation: Any) -> str:
    frames = jax_internals.frames(equation)
    skipped = tuple(os.path.dirname(os.path.abspath(path)) + os.sep for path in _library_files())
    own = [frame for frame in frames if not os.path.abspath(frame.file_name).startswith(skipped)]
    if not (own or frames):
        return "unknown"
    frame = (own or frames)[0]
    return f"{os.path.relpath(frame.file_name)}:{frame.line_num} ({frame.function_name.rsplit('.', 1)[-1]})"


def _library_files() -> list[str]:
    found = [getattr(sys.modules.get(name), "__file__", None) for name in _LIBRARIES]
    return [*filter(None, found), os.path.join(sysconfig.get_path("stdlib"), "contextlib.py")]
