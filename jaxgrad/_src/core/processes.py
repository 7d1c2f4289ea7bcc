"""Agreement between the processes of a program."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np


def text_of_first_process(text: Callable[[], str]) -> str:
    """Returns the text of the first process in every process. All of them must call it.

    Raises what `text` raises: in a multi-process program only the first process calls it, and the others raise
    RuntimeError where it fails.
    """
    if jax.process_count() == 1:
        return text()
    from jax.experimental.multihost_utils import broadcast_one_to_all

    broadcast_one_to_all(np.int32(0))  # connects the processes first: that may not wait as long as `text` takes
    error: Exception | None = None
    content = b""
    if jax.process_index() == 0:
        try:
            content = text().encode()
        except Exception as raised:  # the other processes wait below
            error = raised
    size = broadcast_one_to_all(np.int64(-1 if error else len(content)).astype(np.int32))
    if error:
        raise error
    if size < 0:
        raise RuntimeError("jaxgrad: the first process of the program failed; its error says why")
    padded = np.frombuffer(content.ljust(int(size), b"\0"), np.uint8)
    return bytes(np.asarray(broadcast_one_to_all(padded))).decode()
