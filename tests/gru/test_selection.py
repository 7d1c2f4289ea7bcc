"""Which implementation runs a call on a CPU, by the table of preferences."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import jaxgrad

FRAMEWORKS = {"linear_before_reset": True}  # the GRU of flax, equinox and PyTorch


def _operands(T, B, H=16, dtype="float32"):
    shapes = (T, B, 8), (1, 3 * H, 8), (1, 3 * H, H)
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def _implementation(*operands, **settings):
    return jaxgrad.explain(jaxgrad.gru, *operands, **settings, platform="cpu").implementation


@pytest.mark.parametrize(
    ("T", "B", "dtype", "settings", "expected"),
    [
        (1, 4, "float32", FRAMEWORKS, "xla"),
        (1, 4, "float32", {}, "xla"),
        (1, 64, "bfloat16", FRAMEWORKS, "xla"),
        (1, 64, "bfloat16", {}, "xla"),
        (1, 64, "float32", FRAMEWORKS, "xla"),
        (1, 64, "float32", {}, "xla"),
        (2, 4, "float32", FRAMEWORKS, "cpu"),
        (1, 4, "float32", {**FRAMEWORKS, "implementation": "cpu"}, "cpu"),
        (0, 4, "float32", FRAMEWORKS, "cpu"),
        (1, 0, "float32", FRAMEWORKS, "cpu"),
    ],
)
def test_single_steps_run_on_xla(T, B, dtype, settings, expected):
    assert _implementation(*_operands(T, B, dtype=dtype), **settings) == expected


@pytest.mark.parametrize("linear_before_reset", [False, True])
def test_a_rollout_is_a_loop_of_xla(linear_before_reset):
    """No kernel is called in the steps, whose weights it would pack each time."""
    settings = {"linear_before_reset": linear_before_reset}
    x, w, r = (jnp.ones(a.shape, a.dtype) for a in _operands(1, 4))

    def rollout(h):
        return jax.lax.scan(lambda h, _: (jaxgrad.gru(x, w, r, initial_h=h, **settings)[1], None), h, length=5)[0]

    h = jnp.zeros((1, 4, 16), "float32")
    assert "jaxgrad_" not in jax.jit(rollout).trace(h).lower(lowering_platforms=("cpu",)).as_text()
