"""PyTorch's transposed convolutions as a reference: groups, output padding and bias, which `jax.lax` lacks."""

from __future__ import annotations

import numpy as np
import pytest
from backends import ONEDNN, XLA, XLA_ON_GPU
from conv_cases import cotangent
from conv_running import Result, assert_same, conv_transpose, run, terms
from conv_transpose_cases import TransposeCase, make_transpose_inputs

torch = pytest.importorskip("torch")
BACKENDS = (ONEDNN, XLA, XLA_ON_GPU)

LAYOUTS = {1: ("NCW", "OIW", "NCW"), 2: ("NCHW", "OIHW", "NCHW"), 3: ("NCDHW", "OIDHW", "NCDHW")}


def _case(n, **settings):
    sizes = {"spatial": (5, 3, 4)[:n], "window": (3, 4, 2)[:n], "layout": LAYOUTS[n]}
    return TransposeCase(**sizes, transpose_kernel=True, use_consistent_padding=True, **settings)


CASES = [
    _case(1, strides=(3,), padding=((1, 1),), output_padding=(2,), groups=2),
    _case(1, strides=(2,), padding=((2, 2),), rhs_dilation=(3,), output_padding=(2,)),  # below the dilation
    _case(1, strides=(1,), padding=((0, 0),), groups=3, bias=False),
    _case(2, strides=(2, 3), padding=((1, 1), (0, 0)), output_padding=(1, 2)),
    _case(2, strides=(2, 3), padding=((1, 1), (2, 2)), output_padding=(1, 0), groups=4),
    _case(2, strides=(2, 1), padding=((1, 1), (3, 3)), rhs_dilation=(1, 2), groups=2, batch=1),
    _case(2, strides=(2, 2), padding=((0, 0), (1, 1)), features=1, out_features=1, groups=8),
    _case(2, strides=(2, 2), padding=((0, 0), (1, 1)), features=1, out_features=3, groups=4),
    _case(3, strides=(2, 1, 3), padding=((1, 1), (0, 0), (1, 1)), output_padding=(1, 0, 2), groups=2),
    _case(3, strides=(1, 2, 2), padding=((0, 0), (1, 1), (0, 0)), rhs_dilation=(2, 1, 1)),
]


def _torch(case, inputs, dy):
    function = {1: "conv_transpose1d", 2: "conv_transpose2d", 3: "conv_transpose3d"}[case.n]
    leaves = [None if a is None else torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in inputs]
    y = getattr(torch.nn.functional, function)(
        *leaves,
        stride=case.strides,
        padding=tuple(low for low, _ in case.padding),
        output_padding=case.output_padding,
        groups=case.groups,
        dilation=case.rhs_dilation or 1,
    )
    y.backward(torch.tensor(dy, dtype=torch.float64))
    return Result(y.detach().numpy(), *(None if leaf is None else leaf.grad.numpy() for leaf in leaves))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_values_and_gradients(backend, case, dtype):
    if dtype == "float64" and backend.implementation == "onednn":
        pytest.skip("oneDNN has no float64")
    inputs = make_transpose_inputs(case, dtype)
    op = conv_transpose(backend, **case.settings)
    y = op(*inputs)
    dy = cotangent(y.shape, dtype)
    expected = _torch(case, inputs, dy)
    actual = run(op, type(inputs)(*backend.put(tuple(inputs))), backend.put(dy))
    assert_same(actual, expected, dtype=dtype, terms=terms(inputs, y), message=str(case))
    np.testing.assert_equal(y.shape, expected.y.shape)
