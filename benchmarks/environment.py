"""The environment of a run: versions, hardware and the settings that change times."""

from __future__ import annotations

import datetime
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax

from jaxgrad import config
from jaxgrad._src.choice.environment import cpu_name

_STARTED = datetime.datetime.now(datetime.UTC)
_PACKAGES = ("jaxgrad", "jax", "jaxlib", "numpy", "torch", "flax", "equinox")
_VARIABLES = ("XLA_FLAGS", "OMP_NUM_THREADS", "JAX_DEFAULT_MATMUL_PRECISION", "NVIDIA_TF32_OVERRIDE")


def describe() -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "date": _STARTED.date().isoformat(),
        "started": _STARTED.isoformat(timespec="seconds"),
        "platform": jax.default_backend(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "runtime": " ".join(device.client.platform_version.split()),
        "cpu": cpu_name(),
        "cpu_cores": os.cpu_count(),
        "gpu": device.device_kind if jax.default_backend() == "gpu" else None,
        "settings": _settings(),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def _settings() -> dict[str, Any]:
    """The settings of jaxgrad.config that differ from the defaults."""
    usual = vars(config.Settings())
    return {name: value for name, value in vars(config.current()).items() if value != usual[name]}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
