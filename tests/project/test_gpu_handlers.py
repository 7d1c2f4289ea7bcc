"""gpu_handlers.py, which compute-sanitizer watches on a GPU, on the fakes of fake_cuda.c."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cuda_module import NEEDS_CUDA_MODULE

pytestmark = NEEDS_CUDA_MODULE

_SCRIPT = Path(__file__).parents[1] / "gpu_handlers.py"


def test_handlers_read_and_write_what_the_script_copies(environment_of_scripts, fake_cuda):
    """The fake computes convolutions in layouts without a transpose. It leaves other results as they are."""
    environment = environment_of_scripts(LD_LIBRARY_PATH=str(fake_cuda), JAX_PLATFORMS="cpu", FAKE_ENGINES="11:100:30")

    def lines(*names: str) -> list[str]:
        command = [sys.executable, _SCRIPT, *names]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
        found = done.stdout.splitlines()
        assert done.returncode == (0 if found[-1].startswith("0 wrong, 12") else 1)
        return found

    right = lines("first float64", "mixed float64")
    assert [" right (" in line for line in right[:-1]] == [True] * 4, right
    assert right[-1] == "0 wrong, 12 calls of 3 handlers"
    assert lines("no such case") == ["0 wrong, 0 calls of 0 handlers"]
    assert lines("1x5")[-1] == "1 wrong, 3 calls of 3 handlers"
