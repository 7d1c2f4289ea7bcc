"""Types for users: a program that type checkers accept runs, and annotations hold where they are checked at run time.

`pre-commit` checks the program with mypy, and `.ci/run` with pyright.
"""

from __future__ import annotations

# ruff: noqa: F722  the shapes in annotations
import importlib.util
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float, TypeCheckError, jaxtyped

import jaxgrad
from jaxgrad import config, nn

pytestmark = pytest.mark.jax_version

PROGRAM = Path(__file__).parent / "consumer" / "program.py"
X, W = jnp.ones((2, 3, 8, 8)), jnp.ones((4, 3, 3, 3))


def test_program():
    spec = importlib.util.spec_from_file_location("consumer_program", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    with jax.enable_x64(False):
        spec.loader.exec_module(module)
        module.main()


def test_the_program_uses_every_public_name():
    text = PROGRAM.read_text()
    unused = [name for name in jaxgrad.__all__ if f"jaxgrad.{name}" not in text]
    unused += [name for name in (*config.__all__, *nn.__all__) if f".{name}" not in text]
    assert set(unused) <= {"Explanation", "SEARCHES"}, unused


@pytest.mark.parametrize("name", [name for name in jaxgrad.__all__ if callable(getattr(jaxgrad, name))])
def test_annotations_can_be_evaluated(name):
    """As beartype and jaxtyping do."""
    value = getattr(jaxgrad, name)
    assert typing.get_type_hints(value) or isinstance(value, type)
    if isinstance(value, type):
        typing.get_type_hints(value.__init__)


def test_jaxtyping():
    """Shapes are checked while a function is traced, also where it is differentiated and mapped."""
    beartype = pytest.importorskip("beartype").beartype

    @jaxgrad.accelerate
    @jaxtyped(typechecker=beartype)
    def block(x: Float[Array, "n c h w"], w: Float[Array, "o c kh kw"]) -> Float[Array, "n o h w"]:
        y = jaxgrad.conv_general_dilated(x, w, (1, 1), "SAME", activation="relu")
        y, mean, _ = jaxgrad.batch_norm_training(y, w[:, 0, 0, 0], w[:, 0, 0, 1], feature_axis=1)
        states, _ = jaxgrad.gru(mean[None, None], *(jnp.ones((1, 12, 4), mean.dtype) for _ in range(2)))
        return y + states.sum()

    gradient = jax.jit(jax.grad(lambda w: block(X, w).sum()))(W)
    assert jnp.all(jnp.isfinite(gradient))
    assert jax.eval_shape(jax.vmap(block, (None, 0)), X, jnp.stack([W, W])).shape == (2, 2, 4, 8, 8)
    with pytest.raises(TypeCheckError, match="typechecking parameter 'w'"):
        block(X, jnp.ones((4, 5, 3, 3)))
    with pytest.raises(TypeCheckError, match="the return value of"):
        jaxtyped(typechecker=beartype)(_wrong)(X, W)


def _wrong(x: Float[Array, "n c h w"], w: Float[Array, "o c kh kw"]) -> Float[Array, "n c h w"]:
    return jaxgrad.conv_general_dilated(x, w, (1, 1), "SAME")


def test_ops_under_beartype():
    """The ops take what their annotations allow."""
    beartype = pytest.importorskip("beartype").beartype
    y = beartype(jaxgrad.conv_general_dilated)(X, W, (1, 1), "SAME", activation=jax.nn.relu)
    ones = jnp.ones(4, y.dtype)
    beartype(jaxgrad.batch_norm_training)(y, ones, ones, feature_axis=1)
    x, w = jnp.ones((3, 2, 4), y.dtype), jnp.ones((1, 12, 4), y.dtype)
    beartype(jaxgrad.gru)(x, w, w, sequence_lens=[3, 1])
    beartype(nn.GRU.__call__)(nn.GRU(4, 4, key=jax.random.key(0), dtype=y.dtype), x, sequence_lens=[3, 1])
