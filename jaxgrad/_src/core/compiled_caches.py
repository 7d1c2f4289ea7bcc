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


# JAX keeps weak references to them.
_of_modules = [_PlanCaches(module) for module in (cpu.module, cuda.module) if module is not None]
for _caches_of_one in _of_modules:
    clear_with_caches_of_jax(_caches_of_one)

# JAX clears all caches when the process ends, which would wait for the GPUs. This runs before.
atexit.register(_of_modules.clear)
