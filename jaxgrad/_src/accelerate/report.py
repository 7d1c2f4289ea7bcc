"""`jaxgrad.report`: the convolutions of a program, and what each of them runs on."""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params

from jaxgrad._src.accelerate.lowering import allowed_implementation, install
from jaxgrad._src.conv import api
from jaxgrad._src.conv.equation import plan_equation
from jaxgrad._src.conv.flops import count_flops
from jaxgrad._src.conv.geometry import described
from jaxgrad._src.conv.params import ConvParams
from jaxgrad._src.core import checks, jax_internals, marks
from jaxgrad._src.core.function_of_arrays import function_of_arrays
from jaxgrad._src.core.named_jit import identity_of
from jaxgrad._src.core.op import lowering_platform, platform_of, public_platform

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
      implementation: what it runs on, as in `jaxgrad.Explanation`. "xla" for a convolution that stays as it is, and for
        a matrix product or another convolution that jaxgrad writes in its place.
      reason: why, in one sentence. For a call of an op of jaxgrad, that the op selected it: `jaxgrad.explain` says why.
      flops: the floating-point operations of one call, as XLA counts them for a convolution: 2 for each product with an
        element that is no padding. They do not depend on the implementation. None for symbolic shapes.
      count: the number of equations. The body of a loop counts once.
    """

    source: str
    lhs: str
    rhs: str
    result: str
    pass_name: str
    implementation: str
    reason: str
    flops: int | None
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

    @property
    def flops(self) -> int | None:
        """The operations of all convolutions. The body of a loop counts once. None for symbolic shapes."""
        total = 0
        for convolution in self.convolutions:
            if convolution.flops is None:
                return None
            total += convolution.count * convolution.flops
        return total

    def __str__(self) -> str:
        header = ("source", "lhs", "rhs", "result", "pass", "runs on", "count", "MFLOP", "why")
        rows = [
            (
                *(c.source, c.lhs, c.rhs, c.result, c.pass_name or "-", c.implementation),
                *(str(c.count), _in_millions(c.flops), c.reason),
            )
            for c in self.convolutions
        ]
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (header, *rows)]
        total = sum(self.counts.values())
        left = self.counts.get("xla", 0)
        flops = _in_millions(self.flops)
        return "\n".join([*lines, f"{total} convolutions on {self.platform}, {left} of them on XLA; {flops} MFLOP"])


def _in_millions(flops: int | None) -> str:
    return "-" if flops is None else f"{flops / 1e6:.4g}"


def report(function: Callable[..., Any], *args: Any, platform: str | None = None, **kwargs: Any) -> Report:
    """Returns the convolutions of a function, what each of them runs on, and why. Runs nothing.

    Args:
      function: the function, accelerated or not, which may be one of `jax.jit`, `nnx.jit` or `equinox.filter_jit`.
      *args: the arguments of a call. Arrays may be `jax.ShapeDtypeStruct`.
      platform: "cpu" or "gpu" (or "cuda"); by default the platform of JAX's default device. Without a GPU, the answer
        for "gpu" leaves out jaxgrad's own CUDA kernels. The argument is not passed to the function.
      **kwargs: the keyword arguments of the call.

    Returns:
      A `Report`. It has the convolutions of `jax.lax` and of jaxgrad, also those that differentiation and `vmap` have
      made. Shapes are those of whole arrays, and inside `shard_map` those of shards.

    Raises:
      TypeError: function is not callable.
      ValueError: platform is unknown.

    Examples:
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
    checks.check_choice("jaxgrad.report", "platform", platform, (None, "cpu", "gpu", "cuda"))
    platform = public_platform(platform or jax.default_backend())
    problem = install()
    found = _convolutions(_jaxpr(function, args, kwargs), platform, problem)
    return Report(platform, tuple(dataclasses.replace(c, count=count) for c, count in found.items()))


def _jaxpr(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    # A bound method takes `trace` from the function, which does not know the object.
    if hasattr(function, "trace") and not inspect.ismethod(function):
        traced = function.trace(*args, **kwargs)
        return getattr(traced, "traced", traced).jaxpr.jaxpr  # nnx.jit wraps what jax.jit returns
    call, arrays = function_of_arrays(function, args, kwargs)
    return jax.jit(call).trace(*arrays).jaxpr.jaxpr


def _convolutions(jaxpr: Jaxpr, platform: str, problem: str) -> Counter[Convolution]:
    """The convolutions of a jaxpr and how often each occurs, in the order of the program."""
    known: dict[tuple[Jaxpr, str], Counter[Convolution]] = {}  # programs share jaxprs

    def count(jaxpr: Jaxpr, outer: str) -> Counter[Convolution]:
        """`outer` is the source of the equation that contains the jaxpr."""
        if (jaxpr, outer) in known:
            return known[jaxpr, outer]
        found: Counter[Convolution] = Counter()
        for equation in jaxpr.eqns:
            source = _source(equation, outer)
            if equation.primitive is lax.conv_general_dilated_p:
                found[_of_lax(equation, source, platform, problem)] += 1
            elif (params := _conv_params(equation)) is not None:
                found[_of_jaxgrad(equation, *params, source, platform)] += 1
            else:
                for inner in jaxprs_in_params(equation.params):
                    found.update(count(inner, source))
        known[jaxpr, outer] = found
        return found

    return count(jaxpr, "unknown")


def _of_lax(equation: JaxprEqn, source: str, platform: str, problem: str) -> Convolution:
    """A convolution of `jax.lax`."""
    metadata = jax_internals.equation_metadata(equation)
    avals: list[Any] = [variable.aval for variable in (*equation.invars, *equation.outvars)]
    pass_name, implementation = "", "xla"
    if _called_by_op(equation):
        reason = "selected by the op of jaxgrad"
    elif problem:
        reason = problem
    elif marks.mark_in(metadata) is None:
        reason = "not accelerated"
    elif not marks.is_accelerated(metadata):
        reason = "acceleration is switched off"
    else:
        plan = plan_equation(equation.params, avals, lowering_platform(platform), allowed_implementation(metadata))
        pass_name, implementation, reason = plan.pass_name, plan.implementation, plan.reason
    dn = equation.params["dimension_numbers"]
    specs = zip(avals, dn, ("NC", "OI", "NC"), strict=True)
    lhs, rhs, result = (described(aval.dtype, aval.shape, *spec) for aval, *spec in specs)
    names = ("window_strides", "padding", "lhs_dilation", "rhs_dilation")
    flops = _flops(avals, dn, *(equation.params[name] for name in names))
    return Convolution(source, lhs, rhs, result, pass_name, implementation, reason, flops)


def _flops(avals: Sequence[Any], specs: Sequence[Sequence[int]], *settings: Any) -> int | None:
    """The flops of a convolution of x and w with the result y, some of which may have axes of problems first."""
    if not all(isinstance(size, int) for aval in avals for size in aval.shape):
        return None
    leading = [aval.ndim - len(spec) for aval, spec in zip(avals, specs, strict=True)]
    problems = max(math.prod(aval.shape[:n]) for aval, n in zip(avals, leading, strict=True))
    x, w, y = (aval.shape[n:] for aval, n in zip(avals, leading, strict=True))
    spatial = [[shape[axis] for axis in spec[2:]] for shape, spec in zip((x, w, y), specs, strict=True)]
    features = w[specs[1][0]] * w[specs[1][1]]
    return count_flops(problems * y[specs[2][0]], features, *spatial, *settings)


def _conv_params(equation: JaxprEqn) -> tuple[str, ConvParams] | None:
    """The pass and the parameters of a call of one of jaxgrad's convolution passes; None for other equations."""
    name, (params, *_) = identity_of(equation.params.get("name", "")) or ("", (None,))
    return (name.removeprefix("conv_"), params) if isinstance(params, ConvParams) else None


def _of_jaxgrad(equation: JaxprEqn, pass_name: str, params: ConvParams, source: str, platform: str) -> Convolution:
    """A call of a pass, by an op of jaxgrad. The passes of independent problems have a first axis of problems."""
    g = params.geometry
    specs = {
        "forward": ((g.lhs_spec, "NC"), (g.rhs_spec, "OI"), (g.out_spec, "NC")),
        "input_gradient": ((g.out_spec, "NC"), (g.rhs_spec, "OI"), (g.lhs_spec, "NC")),
        "weight_gradient": ((g.lhs_spec, "NC"), (g.out_spec, "NC"), (g.rhs_spec, "OI")),
    }[pass_name]
    avals: list[Any] = [variable.aval for variable in (*equation.invars[:2], equation.outvars[0])]
    lhs, rhs, result = (described(aval.dtype, aval.shape, *spec) for aval, spec in zip(avals, specs, strict=True))
    candidates, reason = dict(params.candidates)[pass_name], "selected by the op of jaxgrad"
    own = (name for name in candidates.implementations if platform_of(name) == lowering_platform(platform))
    implementation = next(own, "xla")
    if (forced := candidates.forced) and platform_of(forced.implementation) != lowering_platform(platform):
        reason = f"implementation={forced.implementation!r} of the op raises ValueError on this platform"
    order = {"forward": (0, 1, 2), "input_gradient": (2, 1, 0), "weight_gradient": (0, 2, 1)}[pass_name]
    settings = g.window_strides, g.padding, (1,) * len(g.padding), g.rhs_dilation
    flops = _flops([avals[i] for i in order], g.dimension_numbers, *settings)
    return Convolution(source, lhs, rhs, result, pass_name, implementation, reason, flops)


def _called_by_op(equation: JaxprEqn) -> bool:
    frames = jax_internals.frames(equation)
    return any(os.path.abspath(frame.file_name) == os.path.abspath(api.__file__) for frame in frames)


def _source(equation: JaxprEqn, outer: str) -> str:
    """The innermost line outside the libraries; `outer` if there is none."""
    libraries = tuple(os.path.dirname(os.path.abspath(path)) + os.sep for path in _library_files())
    for frame in jax_internals.frames(equation):
        if not os.path.abspath(frame.file_name).startswith(libraries):
            return f"{os.path.relpath(frame.file_name)}:{frame.line_num} ({frame.function_name.rsplit('.', 1)[-1]})"
    return outer


def _library_files() -> list[str]:
    found = [getattr(sys.modules.get(name), "__file__", None) for name in _LIBRARIES]
    return [*filter(None, found), os.path.join(sysconfig.get_path("stdlib"), "contextlib.py")]
