"""The functions of `jax.nn` as the argument `activation=`."""

from __future__ import annotations

import re
from functools import partial

import jax
import numpy as np
import pytest

import jaxgrad

X, W = np.ones((2, 4, 6, 5), np.float32), np.ones((7, 4, 3, 3), np.float32)
C = np.ones(5, np.float32)
CALLS = {
    "conv_general_dilated": (("relu", "silu", "gelu"), (X, W, (1, 1), "SAME")),
    "conv_transpose": (("relu", "silu", "gelu"), (X, np.ones((3, 3, 5, 7), np.float32), (2, 1), "SAME")),
    "batch_norm_training": (("relu",), (X, C, C)),
}


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, (names, _) in CALLS.items() for name in names])
def test_a_function_stands_for_its_name(op, name):
    def program(activation):
        call = partial(getattr(jaxgrad, op), activation=activation)
        jaxpr = jax.make_jaxpr(call, static_argnums=(2, 3) if "conv" in op else ())(*CALLS[op][1])
        return re.sub("0x[0-9a-f]+", "", str(jaxpr))

    assert program(getattr(jax.nn, name)) == program(name) != program(None)
