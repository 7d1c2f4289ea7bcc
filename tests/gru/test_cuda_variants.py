"""The choice of the GRU's CUDA kernels for a GPU, with the fake driver of fake_cuda.c. No GPU is needed."""

from __future__ import annotations

import pytest
from cuda_module import NEEDS_CUDA_MODULE

pytestmark = NEEDS_CUDA_MODULE

_VARIANTS = """
import json, sys
from jaxgrad._src.native import cuda
FLOAT32, FLOAT64, BFLOAT16 = 0, 1, 2

def variant(hidden, rows=8, is_backward=False, type=BFLOAT16, tf32=False, linear=True, problems=1):
    try:
        return cuda.module.gru_variant(
            device=0, is_backward=is_backward, type=type, allow_tf32=tf32, linear_before_reset=linear,
            problems=problems, rows=rows, hidden=hidden)
    except RuntimeError as error:
        return str(error)

def workspace(*args, **kwargs):
    found = variant(*args, **kwargs)
    return found if isinstance(found, str) else found["workspace_bytes"]

def split(*args, **kwargs):
    "Who holds the weights, the units of a block, rows at once, the blocks of a pair, parts of the rows, and holders."
    found = variant(*args, **kwargs)
    if isinstance(found, str):
        return found
    return [found[name] for name in ("holder", "units", "rows", "pair", "tiles", "holders")]

def loaded(hidden, rows=8, is_backward=False, type=BFLOAT16, tf32=False, problems=1):
    "Why the kernel cannot be compiled or run."
    try:
        return cuda.module.load_gru_kernel(
            device=0, is_backward=is_backward, type=type, allow_tf32=tf32, linear_before_reset=True,
            problems=problems, rows=rows, hidden=hidden)
    except ValueError as error:
        return f"ValueError: {error}"
"""


@pytest.fixture
def run(on_fake_cuda):
    return lambda script, **environment: on_fake_cuda(_VARIANTS + script, **environment)


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


# For each kind of operands: what split() returns, for the forward and the backward pass.
_SPLITS = {
    "BFLOAT16": {
        (43, 5): [["block", 0, 1, 1, 5, 5]] * 2,
        (96, 400): [["block", 0, 2, 1, 200, 200]] * 2,
        (97, 132): [["block", 0, 1, 1, 132, 132]] * 2,
        (97, 133): [["cluster", 32, 8, 1, 17, 17]] * 2,
        (256, 600): [["cluster", 32, 8, 1, 75, 75]] * 2,
        (300, 5): [["team", 32, 8, 1, 1, 1]] * 2,
        (512, 100): [["team", 32, 16, 1, 7, 7]] * 2,
        (1024, 128): [["team", 32, 32, 1, 4, 4]] * 2,
        (2048, 64): [["team", 16, 64, 1, 1, 1], ["team", 16, 64, 2, 1, 1]],
    },
    "FLOAT32, tf32=True": {
        (128, 500): [["cluster", 32, 8, 1, 63, 63]] * 2,
        (128, 2000): [["tensor block", 128, 16, 1, 125, 125], ["tensor block", 128, 8, 1, 250, 250]],
        (257, 9): [["team", 32, 8, 1, 2, 2]] * 2,
        (1024, 64): [["team", 16, 32, 1, 2, 2], ["team", 16, 32, 2, 2, 2]],
    },
    "FLOAT32": {
        (20, 300): [["block", 0, 4, 1, 75, 75]] * 2,
        (128, 500): [["block", 0, 1, 1, 500, 500]] * 2,
        (128, 2000): [["block", 0, 1, 1, 2000, 2000]] * 2,
        (256, 8): [["cluster", 32, 8, 1, 1, 1]] * 2,
        (257, 9): [["team", 16, 16, 1, 1, 1], ["team", 16, 16, 2, 1, 1]],
        (512, 64): [["team", 16, 16, 1, 4, 4], ["team", 16, 16, 2, 4, 4]],
        (700, 100): [["team", 16, 64, 1, 2, 2]] * 2,
    },
}


@pytest.mark.parametrize("operands", _SPLITS)
def test_splits(run, operands):
    """Clusters up to 256 hidden units, wide blocks where weights fit, pairs where a backward step exchanges much."""
    sizes = list(_SPLITS[operands])
    found = run(f"""
print(json.dumps([[split(*size, is_backward=b, type={operands}) for b in (False, True)] for size in {sizes}]))
""")
    assert dict(zip(sizes, found, strict=True)) == _SPLITS[operands]


def test_no_more_rows_at_once_than_there_are(run):
    """More problems than teams take turns, with as few rows as each has."""
    found = run("""
sizes = (120, 512, 2048)
print(json.dumps([split(H, rows=8, problems=500, is_backward=b) for H in sizes for b in (False, True)]))
""")
    assert found == [
        *[["tensor block", 128, 8, 1, 1, 500]] * 2,
        *[["team", 32, 8, 1, 1, 8]] * 2,
        ["team", 16, 16, 1, 1, 1],
        ["team", 16, 16, 2, 1, 1],
    ]


def test_many_rows(run):
    """Blocks on tensor cores, from some rows for each multiprocessor on, of one tile of rows or two."""
    found = run("""
def holders(H, *rows, **kwargs):  # and their rows
    return [split(H, rows=B, is_backward=b, **kwargs)[::2][:2] for B in rows for b in (False, True)]

tf32 = dict(type=FLOAT32, tf32=True)
print(json.dumps({
    "32 units": holders(32, 2048), "64 units": holders(64, 462, 463, 925), "90 units": holders(90, 463, 2048),
    "128 units": holders(128, 462, 463, 1056, 1057), "128 units, TF32": holders(128, 594, 595, 1057, **tf32),
    "128 units, TF32, before": holders(128, 1057, **tf32, linear=False),
    "128 units, 200 groups": holders(128, 4, 5, problems=200)}))
""")
    tile, tiles = ["tensor block", 8], ["tensor block", 16]
    assert found == {
        "32 units": [["block", 4]] * 2,
        "64 units": [["block", 2], ["block", 2], ["block", 2], tile, tile, tile],
        "90 units": [tile] * 4,
        "128 units": [["cluster", 8], ["cluster", 8], *[tile] * 4, *[tiles] * 2],
        "128 units, TF32": [["cluster", 8], ["cluster", 8], tile, tile, tiles, tile],
        "128 units, TF32, before": [tiles] * 2,
        "128 units, 200 groups": [["cluster", 8], ["cluster", 8], tile, tile],
    }


def test_smaller_gpus(run):
    """A GPU with clusters but few multiprocessors, and two without, with 164 and 100 KB of shared memory."""
    script = """
sizes = ((43, 64), (120, 64), (256, 64), (300, 64), (512, 64), (1024, 64))
print(json.dumps([split(*size, is_backward=b) for size in sizes for b in (False, True)]))
"""
    slice_of_h100 = run(script, FAKE_MULTIPROCESSORS="16")
    assert slice_of_h100[:10] == [
        ["block", 0, 2, 1, 32, 32],
        ["tensor block", 64, 8, 1, 8, 8],
        *[["tensor block", 128, 8, 1, 8, 8]] * 2,
        *[["cluster", 32, 8, 1, 8, 8]] * 2,
        *[["team", 32, 32, 1, 2, 1]] * 4,
    ]
    assert "1024 hidden units do not fit in the 16 multiprocessors" in slice_of_h100[10]
    sm_80 = run(script, FAKE_MAJOR="8", FAKE_MULTIPROCESSORS="108", FAKE_SHARED="166912")
    assert sm_80 == [
        *[["block", 0, 1, 1, 64, 64]] * 2,
        *[["team", 32, 8, 1, 8, 8]] * 4,
        *[["team", 32, 16, 1, 4, 4]] * 4,
        *[["team", 16, 64, 1, 1, 1]] * 2,  # no pairs, which are clusters of two
    ]
    many = "print(json.dumps([split(128, rows=2048, is_backward=True, type=FLOAT32, tf32=True, linear=False)]))"
    # Two tiles do not fit in its shared memory.
    assert run(many, FAKE_MAJOR="8", FAKE_MULTIPROCESSORS="108", FAKE_SHARED="166912") == [
        ["tensor block", 128, 8, 1, 256, 256]
    ]
    sm_86 = run(script, FAKE_MAJOR="8", FAKE_MINOR="6", FAKE_MULTIPROCESSORS="84", FAKE_SHARED="101376")
    assert sm_86 == [
        *[["block", 0, 1, 1, 64, 64]] * 2,
        *[["team", 32, 8, 1, 8, 8]] * 4,
        *[["team", 32, 8, 1, 8, 5], ["team", 32, 16, 1, 4, 4]] * 2,
        ["team", 16, 16, 1, 4, 1],
        ["team", 16, 64, 1, 1, 1],
    ]


# By multiprocessors and compute capability: the most hidden units of these sizes in bfloat16, TF32 and float32.
_SLICES = {
    (7, 8): [128, 128, 96],
    (7, 9): [128, 128, 128],
    (14, 8): [256, 256, 96],
    (14, 9): [256, 256, 256],
    (16, 9): [512, 512, 256],
}


@pytest.mark.parametrize(("multiprocessors", "major"), _SLICES)
def test_slices_of_a_gpu(run, multiprocessors, major):
    """As MIG and MPS make them: there are no more blocks that exchange the state than multiprocessors."""
    found = run(
        """
def plan(H, B, **call):
    "The blocks that exchange the state, and why the kernel cannot be loaded; or why there is none."
    found = variant(H, B, **call)
    if isinstance(found, str):
        return found
    blocks = found["padded"] // found["units"] if found["holder"] in ("team", "cluster") else 1
    return [blocks * (found["holders"] if found["holder"] == "team" else 1), loaded(H, B, **call)]

operands = dict(type=BFLOAT16), dict(type=FLOAT32, tf32=True), dict(type=FLOAT32)
units = (32, 96, 97, 128, 129, 256, 257, 512, 513, 2048)
print(json.dumps([[i, H, plan(H, B, is_backward=b, problems=problems, **of)] for i, of in enumerate(operands)
                  for H in units for B in (8, 64) for problems in (1, 6) for b in (False, True)]))
""",
        FAKE_MULTIPROCESSORS=str(multiprocessors),
        FAKE_MAJOR=str(major),
        FAKE_OCCUPANCY="1",
    )
    most = [0, 0, 0]
    for operands, hidden, plan in found:
        if isinstance(plan, str):
            assert f" of {hidden} hidden units do not fit in the {multiprocessors} multiprocessors of the GPU" in plan
        else:
            assert plan[0] <= multiprocessors
            assert plan[1] == ""
            most[operands] = max(most[operands], hidden)
    assert most == _SLICES[multiprocessors, major]


def test_older_gpus_have_no_clusters(run):
    found = run("print(json.dumps([workspace(128), workspace(256)]))", FAKE_MAJOR="8")
    assert found == [8 * 256 * 8 * 2] * 2


def test_other_gpus_do_not_fill_registers(run):
    found = run("print(json.dumps([split(H, type=FLOAT32)[0] for H in (96, 97, 128)]))", FAKE_MAJOR="10")
    assert found == ["block", "cluster", "cluster"]


def test_rejections(run):
    found = run("""
print(json.dumps([workspace(2049), workspace(16, type=FLOAT64), workspace(2048, type=FLOAT32),
                  workspace(769, type=FLOAT32), workspace(512, rows=1 << 20)]))
""")
    does_not_fit = (
        "the recurrent weights of {} hidden units do not fit in the 132 multiprocessors of the GPU, with 232448 bytes "
        "of shared memory each"
    )
    assert found == [
        "jaxgrad's GRU kernels have at most 2048 hidden units",
        "jaxgrad's GRU kernels do not compute float64",
        does_not_fit.format(2048),
        does_not_fit.format(769),
        "jaxgrad's GRU kernels compute at most 134217728 states in a step",
    ]
    assert "compute capability 8.0" in run("print(json.dumps(workspace(16)))", FAKE_MAJOR="7")
    assert "do not fit" in run("print(json.dumps(workspace(1024)))", FAKE_SHARED="49152")


def test_blocks_that_cannot_run_at_once(run):
    load = "print(json.dumps([loaded(hidden) for hidden in (96, 256, 512)]))"
    assert run(load) == ["", "", ""]
    fills = load.replace("(96, 256, 512)", "(96, 128)")
    assert run(fills) == ["", ""]
    # With so few, the thread would wait for others for ever.
    few = "ValueError: a thread of a kernel of jaxgrad's GRU starts with only 167 registers"
    assert run(fills, FAKE_REGISTERS="167") == ["", few]
    targets = [message.split(" for ")[1].split(":")[0] for message in run(fills, FAKE_NVRTC="6")]
    assert targets == ["sm_90", "sm_90a"]
    assert run(load, FAKE_OCCUPANCY="0") == [
        "ValueError: a block of a kernel of jaxgrad's GRU does not fit a multiprocessor of the GPU",
        *(
            f"ValueError: the GPU runs 0 blocks of a kernel of jaxgrad's GRU at once, and {blocks} exchange the state"
            for blocks in (8, 16)
        ),
    ]
