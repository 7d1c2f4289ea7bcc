"""Parameters of `hk.GRU`, against `hk.dynamic_unroll`."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from converted_gru import B, H, I, T, assert_same_bits, normal, random_like

from jaxgrad.convert import haiku as convert

pytestmark = pytest.mark.jax_version

hk = pytest.importorskip("haiku")

X = normal(T, B, I)


def test_read_and_write():
    def run(x):
        core = hk.GRU(H)
        return hk.dynamic_unroll(core, x, core.initial_state(B))

    transformed = hk.without_apply_rng(hk.transform(run))
    params = random_like(transformed.init(jax.random.key(0), X))
    layers = convert.read_gru(params["gru"])
    np.testing.assert_allclose(layers[0](X)[0][:, 0], transformed.apply(params, X)[0], rtol=0, atol=1e-12)
    assert_same_bits(convert.write_gru(layers), (params["gru"],))
    pair = convert.read_gru((params["gru"], params["gru"]))
    np.testing.assert_array_equal(pair[0](X)[0][:, 0], layers[0](X)[0][:, 0])
    assert_same_bits(convert.write_gru(pair), ((params["gru"], params["gru"]),))
    with pytest.raises(ValueError, match=r"must have linear_before_reset=False, which haiku.GRU computes, got True"):
        convert.write_gru(dataclasses.replace(layers[0], linear_before_reset=True))
    with pytest.raises(ValueError, match=r"the parameters w_i, w_h, b of haiku.GRU, got \['gru'\]"):
        convert.read_gru(params)
