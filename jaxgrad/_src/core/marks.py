"""The mark that `jaxgrad.accelerate` puts on the equations of a program, and the exemption from it.

The mark is XLA metadata. JAX stores it with each equation and hands it on to the equations that differentiation, `vmap`
and other transformations make of it. It is part of the key of JAX's trace caches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jax.experimental.xla_metadata import set_xla_metadata

from jaxgrad._src.core.jax_internals import Metadata, current_metadata

_KEY = "jaxgrad"
AUTOMATIC = "auto"  # the fastest implementation
EXEMPT = "xla"


def marked(mark: str) -> contextlib.AbstractContextManager[None]:
    """Marks the equations that are traced inside a `with` block: an implementation, AUTOMATIC or EXEMPT."""
    return set_xla_metadata(**{_KEY: mark})


def mark_in(metadata: Metadata) -> str | None:
    """The mark of an equation with these metadata; None if it has none."""
    return metadata.get(_KEY)


def is_accelerated(metadata: Metadata) -> bool:
    """Whether an equation with these metadata is accelerated."""
    return mark_in(metadata) not in (None, EXEMPT)


@contextlib.contextmanager
def exempt() -> Iterator[None]:
    """Leaves the convolutions that are traced inside to XLA: jaxgrad itself writes them. Also a decorator.

    Outside `jaxgrad.accelerate` it adds no metadata to the program.
    """
    if is_accelerated(current_metadata()):
        with marked(EXEMPT):
            yield
    else:
        yield
