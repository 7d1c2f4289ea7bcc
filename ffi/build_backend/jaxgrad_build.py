"""The build backend: scikit-build-core, plus the headers of the CUDA module if JAXGRAD_CUDA=1.

The headers come in packages that contain all of cuDNN, about 700 MB, so a plain source install does not download them.
Without them it builds the CPU module only, unless they are installed already (see ffi/cuda/find_headers.py).
"""

from __future__ import annotations

import os
from typing import Any

from scikit_build_core import build as _build

build_editable = _build.build_editable
build_sdist = _build.build_sdist
build_wheel = _build.build_wheel
get_requires_for_build_sdist = _build.get_requires_for_build_sdist
prepare_metadata_for_build_editable = _build.prepare_metadata_for_build_editable
prepare_metadata_for_build_wheel = _build.prepare_metadata_for_build_wheel

_CUDA_HEADERS = ["nvidia-cudnn-cu12==9.28.0.42", "nvidia-cuda-runtime-cu12==12.9.79", "nvidia-cuda-nvcc-cu12==12.9.86"]


def _cuda_headers() -> list[str]:
    requested = os.environ.get("JAXGRAD_CUDA", "")
    if requested not in ("", "0", "1"):
        raise ValueError(f"JAXGRAD_CUDA must be 0, 1 or unset, got {requested!r}")
    return _CUDA_HEADERS if requested == "1" else []


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    return [*_build.get_requires_for_build_editable(config_settings), *_cuda_headers()]


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    return [*_build.get_requires_for_build_wheel(config_settings), *_cuda_headers()]
