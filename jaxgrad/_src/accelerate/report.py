"""`jaxgrad.report`: the calls of a program that have kernels, and what each of them runs on."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax

from jaxgrad._src.accelerate.lowering import install
from jaxgrad._src.accelerate.program import search
from jaxgrad._src.accelerate.results import Report
from jaxgrad._src.choice.op import public_platform
from jaxgrad._src.core import checks
from jaxgrad._src.run.function_of_arrays import function_of_arrays


def report(function: Callable[..., Any], *args: Any, platform: str | None = None, **kwargs: Any) -> Report:
    """Returns the convolutions, poolings, normalizations and GRUs of a function, and what each runs on and why.

    Runs nothing.

    Args:
      function: the function, accelerated or not, which may be one of `jax.jit`, `nnx.jit` or `equinox.filter_jit`.
      *args: the arguments of a call. Arrays may be `jax.ShapeDtypeStruct`.
      platform: "cpu" or "gpu" (or "cuda"); by default the platform of JAX's default device. Without a GPU, the answer
        for "gpu" leaves out jaxgrad's CUDA kernels. The argument is not passed to the function.
      **kwargs: the keyword arguments of the call.

    Returns:
      A `Report`. It has the convolutions and poolings of `jax.lax` and of jaxgrad, and the normalizations and
      GRUs of jaxgrad, also those that differentiation and `vmap` have made. Shapes are those of whole arrays, and
      inside `shard_map` those of shards. `print` shows a row for each layer, and whether a gain is to be expected.

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
      [('forward', 'onednn'), ('weight_gradient', 'onednn')]
    """
    if not callable(function):
        raise TypeError(f"jaxgrad.report: function must be callable, got {type(function).__name__}")
    checks.check_choice("jaxgrad.report", "platform", platform, (None, "cpu", "gpu", "cuda"))
    platform = public_platform(platform or jax.default_backend())
    problem = install()
    found = search(_jaxpr(function, args, kwargs), platform, problem)
    calls = tuple(dataclasses.replace(call, count=count) for call, count in found.calls.items())
    return Report(platform, calls, found.products)


def _jaxpr(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    # A bound method takes `trace` from the function, which does not know the object.
    if hasattr(function, "trace") and not inspect.ismethod(function):
        traced = function.trace(*args, **kwargs)
        return getattr(traced, "traced", traced).jaxpr.jaxpr  # nnx.jit wraps what jax.jit returns
    call, arrays = function_of_arrays(function, args, kwargs)
    return jax.jit(call).trace(*arrays).jaxpr.jaxpr
