"""Which contenders of PyTorch can run here, and why the others are left out."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec

import jax

from benchmarks.contender_names import TORCH_COMPILED
from benchmarks.options import Options
from benchmarks.timing import Contender
from benchmarks.wording import brief


def left_out(names: tuple[str, ...], options: Options) -> dict[str, str]:
    """Of PyTorch's selected contenders, those that cannot run, each with the reason."""
    selected = [name for name in names if options.wants(name)]
    if (reason := _why_not_torch()) is not None:
        found = dict.fromkeys(selected, reason)
    elif TORCH_COMPILED in selected:
        from benchmarks import torch_compile

        reason = torch_compile.why_not("cuda" if jax.default_backend() == "gpu" else "cpu")
        found = {} if reason is None else {TORCH_COMPILED: f"torch.compile does not work here: {reason}"}
    else:
        found = {}
    return found


def _why_not_torch() -> str | None:
    if find_spec("torch") is None:
        return "torch is not installed"
    import torch

    on_gpu = jax.default_backend() == "gpu"
    return "torch sees no GPU" if on_gpu and not torch.cuda.is_available() else None


def compiled_contender(
    make: Callable[[], Contender], where: str, options: Options, missing: dict[str, str]
) -> Contender | None:
    """The contender; None where compiling fails or takes too long, and the reason in `missing`."""
    from benchmarks import torch_compile

    start = time.perf_counter()
    try:
        with torch_compile.time_limit(options.compile_seconds):
            return make()
    except Exception as error:  # any error of a compiler
        # The compiler may turn the TimeoutError into an error of its own.
        late = time.perf_counter() - start > options.compile_seconds
        reason = f"not compiled within {options.compile_seconds:.0f} s" if late else brief(error)
        missing[f"{TORCH_COMPILED}, of {where}"] = reason
        print(f"  left out: {TORCH_COMPILED} ({reason})", flush=True)
        return None
