"""`jax.jit` of a pass under a name that identifies what it computes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from typing import Any

import jax

from jaxgrad._src.native import cpu, cuda
from jaxgrad._src.version import __version__


def named_jit(function: Callable[..., Any], name: str, *identity: Any) -> Callable[..., Any]:
    """Returns `jax.jit` of a pass. The jitted function's name holds a digest of `identity` and of the libraries.

    The text of a program over a mesh holds the address of a Python callback in place of the pass. JAX can be told to
    leave such addresses out of the keys of its persistent compilation cache. The name then tells programs apart that
    differ only in the parameters of a pass, and it is the same in every process.

    Args:
      function: the pass.
      name: the name of the pass.
      identity: everything that the pass depends on beside the shapes. Equal `repr` means equal.
    """
    digest = hashlib.sha256(repr((identity, library_fingerprint())).encode()).hexdigest()[:16]

    def call(*arrays: Any) -> Any:
        return function(*arrays)

    pass_name = PassName(f"jaxgrad.{name}.{digest}")
    pass_name.identity = name, identity
    call.__name__ = call.__qualname__ = pass_name
    return jax.jit(call)


class PassName(str):
    """The name of a jitted pass. JAX puts the object into every equation that calls the pass.

    Copies and pickles are plain text: the identity may hold a tuning.

    Attributes:
      identity: the name and the identity that `named_jit` was given.
    """

    identity: tuple[str, tuple[Any, ...]]

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


@cache
def library_fingerprint() -> tuple[Any, ...]:
    """Returns the versions of jaxgrad and of the library behind its handlers, and the kind of GPU.

    They are the same on all hosts of a program.

    On a GPU the library is cuDNN. On a CPU it is the compiled module, with its instruction set and oneDNN.
    """
    on_gpu = cuda.gpu_ordinal() is not None
    library = (cuda.cudnn_unavailable() or cuda.build_info()["cudnn"]) if on_gpu else cpu.build_info()
    return __version__, library, cuda.device_kind()
