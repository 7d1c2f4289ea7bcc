"""The machine and the versions that measured times depend on."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
from functools import cache
from importlib.metadata import version
from pathlib import Path

import jax

from jaxgrad._src.core.processes import text_of_first_process
from jaxgrad._src.native import cpu, cuda
from jaxgrad._src.version import __version__


@dataclasses.dataclass(frozen=True)
class Environment:
    """The machine and the versions of a measurement.

    Attributes:
      platform: the platform of JAX's default device when a program is lowered for it: "cpu" or "cuda".
      device_kind: of the device; on a CPU its model, instruction set and number of cores.
      jax, jaxlib, jaxgrad: their versions.
      library: the version of the library behind jaxgrad's kernels: cuDNN or oneDNN.
      driver: the version of the GPU's driver; empty on a CPU.
    """

    platform: str
    device_kind: str
    jax: str
    jaxlib: str
    jaxgrad: str
    library: str
    driver: str = ""

    def __str__(self) -> str:
        libraries = f"jax {self.jax}, jaxlib {self.jaxlib}, jaxgrad {self.jaxgrad}, {self.library}"
        return f"{self.device_kind}: {libraries}{self.driver and f', driver {self.driver}'}"

    def differences(self, measured: Environment) -> str:
        """The differences between this environment and the environment of a measurement, as a text."""
        names = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != getattr(measured, f.name)]
        return ", ".join(f"{name} {getattr(measured, name)!r} and not {getattr(self, name)!r}" for name in names)


@cache
def current_environment() -> Environment:
    """The environment of this process. Starts JAX's backend."""
    device = jax.local_devices()[0]
    versions = jax.__version__, version("jaxlib"), __version__
    if device.platform == "gpu":
        cuda.cudnn_unavailable()  # which loads it
        library = f"cuDNN {cuda.build_info().get('cudnn', '')}"
        return Environment("cuda", device.device_kind, *versions, library, _driver())
    if device.platform != "cpu":
        return Environment(device.platform, device.device_kind, *versions, "")
    cores = os.cpu_count()  # of the machine, which all processes on it agree about
    library = f"oneDNN {cpu.build_info().get('onednn', '')}"
    return Environment("cpu", f"{cpu_name()}, {cores} cores", *versions, library)


_of_first_process: Environment | None = None


def share_first_environment() -> None:
    """Makes the environment of the first process that of the program. All processes must call it."""
    global _of_first_process
    if jax.process_count() > 1:
        text = text_of_first_process(lambda: json.dumps(dataclasses.asdict(current_environment())))
        _of_first_process = Environment(**json.loads(text))


def program_environment() -> Environment | None:
    """The environment by which all processes of a program look up measurements: that of the first process.

    It is kept by `share_first_environment`, because processes look up while they trace, and are not in step then. None
    in a program of several processes before that.
    """
    return current_environment() if jax.process_count() == 1 else _of_first_process


def cpu_name() -> str:
    """The model of the CPU, and the instruction set of jaxgrad's kernels on it."""
    return f"{_cpu_model()}, {cpu.build_info().get('instruction_set', 'no kernels')}"


def _driver() -> str:
    file = Path("/proc/driver/nvidia/version")
    found = re.search(r"Kernel Module.*?\s(\d+(\.\d+)+)\s", file.read_text()) if file.exists() else None
    return found[1] if found else ""


def _cpu_model() -> str:
    file = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", file.read_text()) if file.exists() else None
    return found[1] if found else platform.machine()
