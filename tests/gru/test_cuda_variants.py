"""The choice of the GRU's CUDA kernels for a GPU, with the fake driver of fake_cuda.c. No GPU is needed."""

from __future__ import annotations

import json

import pytest

from jaxgrad._src.native import cuda

pytestmark = pytest.mark.skipif(
    not cuda.targets(), reason="this build has no CUDA module: JAXGRAD_CUDA=1 makes one that has"
)

_WORKSPACES = """
import json, sys
from jaxgrad._src.native import cuda
FLOAT32, FLOAT64, BFLOAT16 = 0, 1, 2

def workspace(hidden, rows=8, is_backward=False, type=BFLOAT16, tf32=False, linear=True, problems=1):
    try:
        return cuda.module.gru_workspace_bytes(
            device=0, is_backward=is_backward, type=type, allow_tf32=tf32, linear_before_reset=linear,
            problems=problems, rows=rows, hidden=hidden)
    except RuntimeError as error:
        return str(error)
"""


@pytest.fixture
def run(run_python, fake_cuda):
    def run(script, **environment):
        settings = {"LD_LIBRARY_PATH": str(fake_cuda), "JAX_PLATFORMS": "cpu", **environment}
        return json.loads(run_python(_WORKSPACES + script, **settings).stdout.splitlines()[-1])

    return run


def test_workspace(run):
    """Each team exchanges through eight slots. A slot has a value of each unit and row for each region."""
    found = run("""
print(json.dumps(dict(
    cluster=workspace(256), rows=workspace(512, 64), turns=[workspace(512, 1000), workspace(512, 100_000)],
    tf32=workspace(512, type=FLOAT32, tf32=True), split=workspace(512, type=FLOAT32),
    backward=workspace(512, is_backward=True), before=workspace(512, linear=False), problems=workspace(512, problems=3),
    padded=[workspace(513), workspace(768)], largest=workspace(2048, 64, is_backward=True))))
""")
    team = 8 * 512 * 8 * 2  # slots, units, rows, bytes
    assert found["cluster"] == 0
    assert found["rows"] == 8 * team
    assert found["turns"] == [8 * 4 * team] * 2  # 132 multiprocessors have 8 teams of 16 blocks, of 32 rows at most
    assert found["tf32"] == 2 * team
    assert found["split"] == 3 * 2 * team  # three planes of 16 rows
    assert found["backward"] == 3 * team
    assert found["before"] == 2 * team
    assert found["problems"] == 3 * team
    assert found["padded"] == [3 * team // 2] * 2
    assert found["largest"] == 8 * 3 * 2048 * 64 * 2


def test_older_gpus_have_no_clusters(run):
    found = run("print(json.dumps([workspace(128), workspace(256)]))", FAKE_MAJOR="8")
    assert found == [8 * 256 * 8 * 2] * 2


def test_rejections(run):
    found = run("""
print(json.dumps([workspace(2049), workspace(16, type=FLOAT64), workspace(2048, type=FLOAT32),
                  workspace(512, rows=1 << 20)]))
""")
    assert found == [
        "jaxgrad's GRU kernels have at most 2048 hidden units",
        "jaxgrad's GRU kernels do not compute float64",
        "the recurrent weights of 2048 hidden units do not fit in the 132 multiprocessors of the GPU, with 232448 "
        "bytes of shared memory each",
        "jaxgrad's GRU kernels compute at most 134217728 states in a step",
    ]
    assert "compute capability 8.0" in run("print(json.dumps(workspace(16)))", FAKE_MAJOR="7")
    assert "do not fit" in run("print(json.dumps(workspace(1024)))", FAKE_SHARED="49152")


def test_blocks_that_cannot_run_at_once(run):
    load = """
print(json.dumps([cuda.module.load_gru_kernel(
    device=0, is_backward=False, type=BFLOAT16, allow_tf32=False, linear_before_reset=True, problems=1, rows=8,
    hidden=hidden) for hidden in (256, 512)]))
"""
    assert run(load) == ["", ""]
    assert run(load, FAKE_OCCUPANCY="0") == [
        f"the GPU runs 0 blocks of a kernel of jaxgrad's GRU at once, and {blocks} exchange the state"
        for blocks in (8, 16)
    ]
