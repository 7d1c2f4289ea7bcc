"""The mark that `jaxgrad.accelerate` puts on the equations of a program, and the exemption from it.

The mark is XLA metadata. JAX stores it with each equation and hands it on to the equations that differentiation, `vmap`
and other transformations make of it. It is part of the key of JAX's trace caches.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from jax.experimental.xla_metadata import set_xla_metadata

MARK = "jaxgrad"  # the metadata's key; its value is an implementation, or AUTOMATIC
AUTOMATIC = "auto"
EXEMPT = "xla"

_marked = threading.local()


@contextlib.contextmanager
def marked(value: str) -> Iterator[None]:
    """Marks the equations that are traced inside a `with` block, in the thread that enters it."""
    outer = getattr(_marked, "value", EXEMPT)
    _marked.value = value
    try:
        with set_xla_metadata(**{MARK: value}):
            yield
    finally:
        _marked.value = outer


@contextlib.contextmanager
def exempt() -> Iterator[None]:
    """Leaves the convolutions that are traced inside to XLA: jaxgrad itself writes them. Also a decorator.

    Outside `jaxgrad.accelerate` it adds no metadata to the program.
    """
    if getattr(_marked, "value", EXEMPT) == EXEMPT:
        yield
    else:
        with marked(EXEMPT):
            yield
