"""The plans and kernels that the compiled modules keep. `jax.clear_caches` frees them."""

from __future__ import annotations

from typing import Any

from jaxgrad._src.core.jax_internals import clear_with_caches_of_jax
from jaxgrad._src.native import cpu, cuda


class _CompiledCaches:
    """The caches of a compiled module, as JAX knows a cache."""

    def __init__(self, module: Any):
        self._module = module

    def cache_clear(self) -> None:
        self._module.clear_caches()

    def cache_info(self) -> dict[str, int]:
        return dict(self._module.conv_plan_cache_info())

    def cache_keys(self) -> tuple[()]:
        return ()


_OF_MODULES = [_CompiledCaches(module) for module in (cpu.module, cuda.module) if module is not None]


def register() -> None:
    """Lets `jax.clear_caches` empty them. JAX keeps no reference to a cache."""
    for caches in _OF_MODULES:
        clear_with_caches_of_jax(caches)
