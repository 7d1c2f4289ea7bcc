"""A network of the benchmarks has the same output with the ops of every library."""

from __future__ import annotations

import benchmarks_package  # noqa: F401
import jax
import numpy as np
import pytest

from benchmarks.networks import NETWORKS
from benchmarks.networks.initial import describe
from benchmarks.networks.jax_ops import JaxgradOps, LaxOps
from jaxgrad._src.tuning.timing import random_operands


@pytest.fixture(scope="module")
def ddpm():
    """The network, its parameters and input, and its output in JAX."""
    network, like = NETWORKS["ddpm-unet-small"].run, jax.ShapeDtypeStruct((2, 8, 8, 3), "float32")
    params = describe(network, like).params
    ((x,),) = random_operands([like], one_call_a_program=True)
    return network, params, x, _output(LaxOps, network, params, x)


def _output(library, network, params, x):
    with jax.default_matmul_precision("highest"):
        return jax.jit(lambda params, x: network(library(params), x))(params, x)


def test_the_ddpm_unet_with_the_ops_of_jaxgrad(ddpm):
    *args, expected = ddpm
    np.testing.assert_allclose(_output(JaxgradOps, *args), expected, rtol=1e-3, atol=1e-3)


def test_the_ddpm_unet_in_pytorch(torch, ddpm):
    from benchmarks.networks.torch_ops import TorchOps, activations, layer

    network, params, x, expected = ddpm
    y = network(TorchOps([layer(each, "cpu") for each in params], (), 0.9), activations(x, "cpu"))
    np.testing.assert_allclose(y.detach().movedim(1, -1).numpy(), expected, rtol=1e-3, atol=1e-3)
