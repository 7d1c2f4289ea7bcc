"""Loads a compiled module and registers its handlers.

A file that was compiled from another version of jaxgrad may lie beside newer Python files, in a checkout above all. A
name that its module lacks is an error with the remedy.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import jax

_REGISTERED: set[str] = set()


class _CompiledModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        # An AttributeError, because tools look for names in all modules: torch.compile for "torch".
        raise AttributeError(
            f"jaxgrad: {self.__file__} was compiled from another version of jaxgrad than its Python files: it lacks "
            f"{name!r}. Delete this file and install jaxgrad again, in a checkout with `pip install -e .`."
        )


def load(name: str) -> Any:
    """Imports a compiled module, such as "jaxgrad._cpu". Raises ImportError where it is missing."""
    module = importlib.import_module(name)
    module.__class__ = _CompiledModule
    return module


def register_handlers(module: Any, platform: str) -> None:
    """Registers the handlers of a compiled module for a platform of JAX: "cpu" or "CUDA"."""
    for target, capsule in module.registrations().items():
        jax.ffi.register_ffi_target(target, capsule, platform=platform)
        _REGISTERED.add(target)


def require_handler(target: str) -> None:
    """Raises ImportError for a handler that the compiled modules lack."""
    if target not in _REGISTERED:
        raise ImportError(
            f"jaxgrad: the compiled modules lack the handler {target!r}: they were compiled from another version of "
            "jaxgrad than its Python files. Install jaxgrad again, in a checkout with `pip install -e .`."
        )
