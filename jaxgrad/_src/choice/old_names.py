"""Old names of implementations, which work for one release: this file and its calls are then deleted.

"depthwise" was the name of jaxgrad's CPU kernels for convolutions, and "cpu" that of the faster of them and oneDNN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxgrad._src.choice.measured_choices import Choice
from jaxgrad._src.core.warn import warn_caller

NAMES = ("depthwise",)  # beside "cpu", which is a name of today too
TUNING_FORMAT = 1  # of files with old names


def current_name(op: Any, implementation: str | None, call: Any) -> str | None:
    """The name of today for the argument `implementation=` of a call.

    `op` is an `Op`. `call` is its description of the call; None for a typical call, and for one that no kernel can run.
    """
    own = op.backend("cpu")
    if implementation not in ("cpu", *NAMES) or own is None or op.backend("onednn") is None:
        return implementation
    is_own = implementation == "depthwise" or (call is not None and own.supports(op.passes[0], call) is None)
    return "cpu" if is_own else "onednn"


def warn_of_old_name(implementation: str | None, now: str | None) -> None:
    """Warns where the name of today, of kernels that run a call, is another one."""
    if now == implementation:
        return
    if now == "cpu":
        message = f"jaxgrad: implementation={implementation!r} is now called 'cpu'"
    else:
        message = (
            "jaxgrad: implementation='cpu' runs this convolution on oneDNN; in the next release 'cpu' means jaxgrad's "
            "own kernels alone; 'onednn' forces oneDNN"
        )
    warn_caller(message, DeprecationWarning)


def current_choices(choices: Mapping[str, Choice]) -> dict[str, Choice]:
    """The choices of a file in the format TUNING_FORMAT, by the names of today. Warns where some are other names."""
    found = {text: _current_choice(text, choice) for text, choice in choices.items()}
    if found != choices:
        warn_caller(
            "jaxgrad: the tuning has the old names 'cpu' and 'depthwise' of implementations of convolutions, which are "
            "now called 'onednn' and 'cpu'; save it again with jaxgrad.Tuning.save",
            DeprecationWarning,
        )
    return found


def _current_choice(text: str, choice: Choice) -> Choice:
    if not text.startswith(("conv ", "jax.lax ")):
        return choice

    def current(name: str) -> str:
        start, on, implementation = name.rpartition(" on ")  # of an accelerated convolution, with the pass
        if implementation == "cpu":  # of the two kernels, the other one was measured under its own name, if at all
            return name if f"{start}{on}onednn" in choice.times_us else f"{start}{on}onednn"
        return f"{start}{on}cpu" if implementation == "depthwise" else name

    times = {current(name): us for name, us in choice.times_us.items()}
    return dataclasses.replace(
        choice, implementation=current(choice.implementation), default=current(choice.default), times_us=times
    )
