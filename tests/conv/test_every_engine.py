"""Every engine of cuDNN that the search may use, over a corpus of lopsided problems: which does the check reject?"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxgrad._src.conv.call.geometry import ConvGeometry
from jaxgrad._src.conv.call.problem import ConvProblem
from jaxgrad._src.native import cuda

pytestmark = [pytest.mark.gpu, pytest.mark.thorough]

PASSES = ("forward", "input_gradient", "weight_gradient")
CHANNELS_LAST = {1: (0, 2, 1), 2: (0, 3, 1, 2), 3: (0, 4, 1, 2, 3)}


def _geometry(spatial, window, strides, dilation, padding, groups, *, channels_last=True):
    n = len(spatial)
    spec = CHANNELS_LAST[n] if channels_last else tuple(range(n + 2))
    return ConvGeometry(spec, spec, spec, strides, padding, dilation, groups, spatial, window)


# Batch, features, output features, and the geometry.
CORPUS = {
    "2D": (3, 16, 24, _geometry((19, 14), (3, 5), (1, 1), (1, 1), ((1, 1), (2, 2)), 1)),
    "NCHW": (3, 16, 24, _geometry((19, 14), (3, 5), (2, 1), (1, 1), ((1, 1), (2, 2)), 1, channels_last=False)),
    "strides": (2, 8, 40, _geometry((23, 30), (3, 4), (2, 3), (1, 1), ((1, 1), (0, 0)), 1)),
    "stride beyond the window": (2, 16, 24, _geometry((23, 19), (2, 3), (3, 5), (1, 1), ((1, 0), (0, 2)), 1)),
    "dilation": (2, 64, 32, _geometry((31, 17), (3, 3), (1, 1), (4, 2), ((4, 4), (2, 2)), 1)),
    "asymmetric": (2, 32, 16, _geometry((18, 27), (3, 2), (1, 2), (2, 1), ((4, 0), (0, 3)), 1)),
    "groups": (2, 24, 36, _geometry((17, 15), (3, 3), (2, 1), (1, 1), ((1, 0), (1, 1)), 3)),
    "depthwise": (2, 40, 40, _geometry((16, 21), (5, 3), (1, 1), (1, 1), ((2, 2), (1, 1)), 40)),
    "odd features": (3, 5, 7, _geometry((13, 12), (3, 3), (1, 1), (1, 1), ((1, 1), (1, 1)), 1)),
    "1D causal": (2, 32, 32, _geometry((1024,), (2,), (1,), (512,), ((512, 0),), 1)),
    "long causal": (2, 16, 16, _geometry((16384,), (2,), (1,), (512,), ((512, 0),), 1)),
    "a window of 28x28": (2, 8, 8, _geometry((28, 28), (28, 28), (1, 1), (1, 1), ((0, 0), (0, 0)), 1)),
    "a window of 28x28 with padding": (2, 8, 8, _geometry((40, 37), (28, 28), (1, 1), (1, 1), ((13, 14), (14, 13)), 1)),
    "a window of 32x32x32": (1, 8, 8, _geometry((32,) * 3, (32,) * 3, (1,) * 3, (1,) * 3, ((0, 0),) * 3, 1)),
    "3D": (2, 16, 24, _geometry((9, 12, 11), (3, 2, 3), (1, 2, 1), (1, 1, 2), ((1, 1), (0, 1), (2, 2)), 1)),
}


_RUN = """
import sys
sys.path.insert(0, {folder!r})
from test_every_engine import engines
engines({name!r}, {dtype!r}, {skipped!r})
"""


def engines(name, dtype, skipped):
    """Runs the engines of all passes of a problem, and prints a line before and after each: one may crash."""
    assert cuda.cudnn_unavailable() == ""
    assert cuda.nvrtc_unavailable() == ""
    batch, features, out_features, g = CORPUS[name]
    problem = ConvProblem(g, batch, features, out_features, jnp.dtype("float32" if dtype == "tf32" else dtype))
    for conv_pass, relu in ((0, False), (0, True), (1, False), (2, False)):
        call = PASSES[conv_pass] + " with relu" * relu

        def wanted(engine, is_known_wrong, call=call):
            line = [call, engine, is_known_wrong]
            print(json.dumps(line), flush=True)
            return line not in skipped

        arguments = cuda.float_type(problem.dtype), problem.shapes, g.attributes(), relu, relu
        limits = dtype == "tf32", 1 << 30
        found = cuda.module.run_every_engine(cuda.gpu_ordinal(), conv_pass, *arguments, *limits, wanted)
        for engine, error, failure in found:
            print(json.dumps([call, engine, failure or float(error)]), flush=True)


def _lines(name, dtype, skipped):
    script = _RUN.format(folder=str(Path(__file__).parent), name=name, dtype=dtype, skipped=skipped)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert done.returncode == 0 or "illegal memory access" in done.stderr, done.stderr
    return lines, done.returncode != 0


@pytest.mark.parametrize("dtype", ["float32", "tf32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("name", CORPUS)
def test_every_engine(name, dtype):
    """Prints the engines that are rejected, with their largest errors: run it with -s.

    In every problem that cuDNN supports some engine is right, and right engines are the rule: a check that is too
    strict would reject many. No engine reads or writes outside of its arrays but those that are never used.
    """
    faulty = []
    lines, has_fault = _lines(name, dtype, faulty)
    while has_fault:
        call, engine, is_known_wrong = lines[-1]
        print("fault:", dtype, name, call, engine)
        assert is_known_wrong is True
        faulty.append(lines[-1])
        lines, has_fault = _lines(name, dtype, faulty)
    known = {(call, engine) for call, engine, value in lines if value is True}
    errors = {(call, engine): value for call, engine, value in lines if type(value) is float}
    for call in dict.fromkeys(call for call, _ in errors):
        of_call = {engine: error for (other, engine), error in errors.items() if other == call}
        right = [error for error in of_call.values() if error <= 1]
        rejected = {e: (error, "known" if (call, e) in known else "") for e, error in of_call.items() if not error <= 1}
        print(dtype, name, call, len(of_call), "engines, right up to", max(right, default=None), "rejected:", rejected)
        assert right
        assert sum(not known for _, known in rejected.values()) < len(of_call) / 2
