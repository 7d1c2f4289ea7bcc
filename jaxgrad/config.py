"""Settings: how cuDNN's engines are chosen, their workspace limit, determinism, where kernels are kept, the tuning.

  >>> jaxgrad.config.update(search="heuristic")
  >>> with jaxgrad.config.override(deterministic=True):
  ...     loss, gradients = step(params, batch)

The settings other than `plan_cache_dir` are part of JAX's trace context: a function under `jax.jit` is traced again
where they change. `search`, `workspace_limit` and `deterministic` apply to cuDNN. oneDNN chooses its kernels by fixed
rules, which are always deterministic.

GPU memory. The workspace of a kernel is a buffer of the compiled program, and `compiled.memory_analysis()` counts it.
If a program does not fit, XLA raises RESOURCE_EXHAUSTED; lower `workspace_limit` to make the program smaller. The size
of the workspace depends on the GPU, the cuDNN version and the settings, and never on the memory that happens to be
free, so all hosts of a multi-process program compile the same program. Beside JAX's memory, cuDNN allocates some tens
of MiB. While the exhaustive search times engines, it also allocates the operands and the workspace of the call; if
there is not enough free memory, it uses the first engine. If cuDNN itself does not fit, a call with
`implementation=None` runs on XLA with a warning in a single process, and raises in a multi-process program.
"""

from jaxgrad._src.choice.settings import SEARCHES as SEARCHES
from jaxgrad._src.choice.settings import Settings as Settings
from jaxgrad._src.choice.settings import current as current
from jaxgrad._src.choice.settings import override as override
from jaxgrad._src.choice.settings import update as update

__all__ = ["SEARCHES", "Settings", "current", "override", "update"]
