"""Arguments that layers of Haiku share."""

from __future__ import annotations

import re
from typing import Any

_FIRST, _LAST = re.compile(r"channels_first|NC[^C]*"), re.compile(r"channels_last|N[^C]*C|(BT|TB)[^D]*D")


def is_channels_last(function: str, data_format: Any) -> bool:
    """Whether the channels are the last axis of a `data_format`, of which Haiku knows the same."""
    if isinstance(data_format, str):
        for pattern, is_last in ((_FIRST, False), (_LAST, True)):
            if pattern.fullmatch(data_format):
                return is_last
    raise ValueError(
        f"{function}: data_format must be one of Haiku's, such as 'channels_last' or 'NCHW', got {data_format!r}"
    )
