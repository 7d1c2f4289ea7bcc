"""For scripts of the fixture `on_fake_cuda`: lowers the GRU for a GPU, and finds the calls of its kernels.

Importing this module makes jaxgrad find a GPU, that of fake_cuda.c, while it lowers.
"""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
from script_results import outcome as outcome
from script_results import report as report

import jaxgrad
from jaxgrad._src.native import cuda

fake: Any = ctypes.CDLL("libcuda.so.1")
cuda.gpu_ordinal = lambda: 0

_CALL = re.compile(r"custom_call @jaxgrad_cuda_gru_(\w+)\(.*backend_config = {(.*?)}.* : (\(.*)")
_NAME = re.compile(r'\w+ @"?([\w.]+)')
_CALLED = re.compile(r'\bcall @"?([\w.]+)')


def arrays(T=10, B=4, I=8, H=43, D=1, dtype="float32"):  # noqa: E741
    shapes = {"x": (T, B, I), "w": (D, 3 * H, I), "r": (D, 3 * H, H), "b": (D, 6 * H), "initial_h": (D, B, H)}
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}


def text_for_gpu(function: Callable[..., Any], *args: Any) -> str:
    """The program of a function, lowered for a GPU."""
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def lowered(*, implementation=None, precision="default", mapped=(), settings=None, **sizes):
    """The program of the value and the gradients."""

    def gradients(given):
        def call(given):
            return jaxgrad.gru(**given, **(settings or {}), implementation=implementation)

        y, pullback = jax.vjp(call, given)
        return y, pullback(y)

    given = arrays(**sizes)
    if mapped:
        axes = {name: 0 if name in mapped else None for name in given}
        given |= {name: jax.ShapeDtypeStruct((3, *given[name].shape), given[name].dtype) for name in mapped}
        gradients = jax.vmap(gradients, (axes,))
    with jax.default_matmul_precision(precision):
        return text_for_gpu(gradients, given)


def calls(text: str) -> list[Sequence[str]]:
    """The calls of the kernels in a program: name, attributes, and shapes of the operands and results."""
    return [match.groups() for match in map(_CALL.search, text.splitlines()) if match]


def runs(text: str) -> dict[str, int]:
    """How often a program runs each kernel, by name, if every loop takes one step."""
    functions = {_NAME.match(function)[1]: function for function in text.split("func.func ")[1:]}

    def kernels(name: str) -> Counter[str]:
        called = [kernels(other) for other in _CALLED.findall(functions[name])]
        return sum(called, Counter(kernel for kernel, *_ in calls(functions[name])))

    return dict(kernels("main"))


def before_loads(call: Callable[..., Any]) -> None:
    """Kernels are loaded after `call`, which gets the pass, problems, rows, hidden units, and the features."""

    class Module:
        def __getattr__(self, name):
            return getattr(module, name)

        def load_gru_kernel(self, is_backward, *key, **features):
            *_, problems, rows, hidden = key
            call(is_backward, problems, rows, hidden, features)
            return module.load_gru_kernel(is_backward, *key, **features)

    module, cuda.module = cuda.module, Module()


def explained(**kwargs):
    sizes = {name: kwargs.pop(name) for name in ("T", "B", "I", "H", "D", "dtype") if name in kwargs}
    return jaxgrad.explain(jaxgrad.gru, **arrays(**sizes), platform="gpu", **kwargs)
