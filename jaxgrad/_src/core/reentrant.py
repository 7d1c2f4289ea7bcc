"""Context managers that may be entered again, also inside themselves and in other threads."""

from __future__ import annotations

import abc
import contextlib
import threading
from typing import Any


class Reentrant(contextlib.AbstractContextManager[Any]):
    """Each `with` block of it enters a new context. A thread leaves its blocks in the reverse order."""

    def __init__(self) -> None:
        self._entered = threading.local()

    @abc.abstractmethod
    def _new_context(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context of one block."""

    def __enter__(self) -> Any:
        context = self._new_context()
        context.__enter__()
        vars(self._entered).setdefault("contexts", []).append(context)
        return self

    def __exit__(self, *error: Any) -> None:
        if not (contexts := vars(self._entered).get("contexts")):
            raise RuntimeError(f"{type(self).__name__}: this thread leaves a block that it has not entered")
        contexts.pop().__exit__(*error)
