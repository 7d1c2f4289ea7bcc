"""The plans and kernels that the compiled modules keep. `jax.clear_caches` frees them."""

from __future__ import annotations

import atexit
from typing import Any

from jaxgrad._src.core.jax_internals import clear_with_caches_of_jax
from jaxgrad._src.native import cpu, cuda


class _PlanCaches:
    """The caches of a compiled module, as JAX knows a cache."""

    def __init__(self, module: Any):
        self.cache_clear = module.clear_caches
        self.cache_info = module.conv_plan_cache_info

    def cache_keys(self) -> tuple[()]:
        return ()


def _registered() -> list[_PlanCaches]:
    """Lets `jax.clear_caches` clear them as long as they are referenced: JAX keeps weak references."""
    found = [_PlanCaches(module) for module in (cpu.module, cuda.module) if module is not None]
    for caches in found:
        clear_with_caches_of_jax(caches)
    return found


# JAX clears all caches when the process ends, which would wait for the GPUs. Before that, these are forgotten.
atexit.register(_registered().clear)
