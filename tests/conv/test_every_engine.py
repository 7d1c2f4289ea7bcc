"""Every engine of cuDNN that the search may use, over a corpus of lopsided problems: which does the check reject?"""

from __future__ import annotations

import collections
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrad._src.conv.geometry import ConvGeometry
from jaxgrad._src.conv.problem import ConvProblem
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


@pytest.mark.parametrize("dtype", ["float32", "tf32", "bfloat16", "float16", "float64"])
def test_every_engine(dtype, record_property):
    """Prints the engines that are rejected, with their largest errors: run it with -s.

    In every problem that cuDNN supports some engine is right, and right engines are the rule: a check that is too
    strict would reject many.
    """
    assert cuda.cudnn_unavailable() == ""
    assert cuda.nvrtc_unavailable() == ""
    rejected = collections.defaultdict(list)
    ran = 0
    for (name, (batch, features, out_features, g)), conv_pass in itertools.product(CORPUS.items(), range(3)):
        problem = ConvProblem(g, batch, features, out_features, jnp.dtype("float32" if dtype == "tf32" else dtype))
        for relu in (False, True) if conv_pass == 0 else (False,):
            arguments = cuda.float_type(problem.dtype), problem.shapes, g.attributes(), relu, relu
            found = cuda.module.run_every_engine(cuda.gpu_ordinal(), conv_pass, *arguments, dtype == "tf32", 1 << 30)
            errors = [(tag, error) for tag, error, failure in found if not failure]
            ran += len(errors)
            for tag, error in errors:
                if not error <= 1:
                    rejected[f"{PASSES[conv_pass]} {tag.split('_')[0]}"].append((name, relu, tag, float(error)))
            right = [error for _, error in errors if error <= 1]
            print(dtype, PASSES[conv_pass], name, relu, len(errors), "engines, right up to", max(right, default=np.nan))
            assert right or not errors, (name, conv_pass, relu, found)
    for engine, places in sorted(rejected.items()):
        print("rejected:", dtype, engine, places)
    record_property("rejected", dict(rejected))
    assert ran > 0
    assert sum(map(len, rejected.values())) < ran / 4
