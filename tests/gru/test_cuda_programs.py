"""How often whole programs run the CUDA kernels of the GRU: trainings under `vmap`, checkpoints. No GPU is needed."""

from __future__ import annotations

import pytest
from cuda_module import NEEDS_CUDA_MODULE

pytestmark = NEEDS_CUDA_MODULE

_IMPORTS = """
import jax, jax.numpy as jnp
import jaxgrad
from gru_lowering import arrays, calls, report, runs, text_for_gpu

def loss(given, **settings):
    y, y_h = jaxgrad.gru(**given, **settings)
    return jnp.sum(jnp.sin(y)) + jnp.sum(y_h ** 2)

def stacked(number, array):
    return jax.ShapeDtypeStruct((number, *array.shape), array.dtype)
"""


@pytest.fixture
def run(on_fake_cuda):
    """Runs a script in a process of its own and returns the values that it passes to `report`."""
    return lambda script: on_fake_cuda(_IMPORTS + script)


def test_trainings_under_vmap_are_one_call_of_each_kernel(run):
    """Steps of gradient descent in a loop, for five models: in each step, the models are groups of one call."""
    found = run("""
MODELS, STEPS = 5, 3

def train(weights, data):
    def step(weights, batch):
        value, gradient = jax.value_and_grad(lambda weights: loss(batch | weights))(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient), value
    return jax.lax.scan(step, weights, data)

def trainings(*shared):
    "The program, where the models share some arrays of the data."
    weights = arrays()
    data = {name: stacked(STEPS, weights.pop(name)) for name in ("x", "initial_h")}
    axes = {name: None if name in shared else 0 for name in data}
    data = {name: array if name in shared else stacked(MODELS, array) for name, array in data.items()}
    weights = {name: stacked(MODELS, array) for name, array in weights.items()}
    return text_for_gpu(jax.vmap(train, (0, axes)), weights, data)

texts = [trainings(), trainings("x"), trainings("x", "initial_h")]
report(programs=[[runs(text), text.count("stablehlo.while"), calls(text)] for text in texts])
""")
    for runs, loops, calls in found["programs"]:
        assert runs == {"forward": 1, "backward": 1}
        assert loops == 1
        (_, _, forward), (_, _, backward) = calls
        assert "tensor<5x10x1x4x43xf32>, tensor<5x1x4x43xf32>, tensor<5x10x1x4x129xf32>" in forward.split(" -> ")[1]
        assert "tensor<5x10x4x1x3x43xf32>" in backward.split(" -> ")[1]


def test_calls_under_checkpoint(run):
    """The name of the residuals saves a second forward pass, also of groups with their own weights."""
    found = run("""
policies = jax.checkpoint_policies
groups = {name: stacked(3, array) for name, array in arrays().items()}

def forward_passes(**policy):
    "Of a gradient, without groups and with."
    gradient = jax.value_and_grad(jax.checkpoint(loss, **policy))
    found = [runs(text_for_gpu(*program)) for program in ((gradient, arrays()), (jax.vmap(gradient), groups))]
    assert all(kernels["backward"] == 1 for kernels in found)
    return [kernels["forward"] for kernels in found]

report(
    nothing=forward_passes(),
    other=forward_passes(policy=policies.save_only_these_names("jaxgrad.conv_transpose")),
    but=forward_passes(policy=policies.save_any_names_but_these("jaxgrad.gru")),
    name=forward_passes(policy=policies.save_only_these_names("jaxgrad.gru")),
    everything=forward_passes(policy=policies.everything_saveable))
""")
    assert found["nothing"] == found["other"] == found["but"] == [2, 2]
    assert found["name"] == found["everything"] == [1, 1]


@pytest.mark.parametrize("groups", [None, 3])
def test_calls_with_remat_every(run, groups):
    """Each pass loops over the chunks, and the backward pass runs the forward kernel again."""
    found = run(f"""
def program(every, groups):
    "Ten steps: how often each kernel runs, the loops, and the calls."
    gradient, given = jax.value_and_grad(lambda given: loss(given, remat_every=every)), arrays(T=10)
    if groups:
        gradient, given = jax.vmap(gradient), {{name: stacked(groups, array) for name, array in given.items()}}
    text = text_for_gpu(gradient, given)
    return runs(text), text.count("stablehlo.while"), calls(text)

report(**{{str(every): program(every, {groups}) for every in (5, 4, 11, None)}})
""")
    kernels = {every: [runs["forward"], runs["backward"], loops] for every, (runs, loops, _) in found.items()}
    # With 4, two steps come after the loops.
    assert kernels == {"5": [2, 1, 2], "4": [4, 2, 2], "11": [2, 1, 0], "None": [1, 1, 0]}
    for *_, calls in found.values():
        assert all(f"tensor<{groups or 1}x" in shapes.split(" -> ")[1] for *_, shapes in calls)
