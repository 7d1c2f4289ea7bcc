"""The examples of language modelling, reinforcement learning, private training and fine-tuning: each learns."""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from scipy.stats import norm

import jaxgrad.nn


@pytest.fixture
def example(monkeypatch):
    """Imports a module of examples/ by its name."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    return importlib.import_module


@pytest.fixture
def run(run_example, example, monkeypatch):
    """Runs a script, which times only a few steps, and returns its output."""
    monkeypatch.setattr(example("training"), "SECONDS", 0)

    def run(name, *arguments):
        text = run_example(name, *arguments)
        assert all(_number(rf"time per step {which} jaxgrad: ([\d.]+) ms", text) > 0 for which in ("without", "with"))
        assert Path(f"{name}.png").stat().st_size > 10_000
        return text

    return run


def _number(pattern, text):
    match = re.search(pattern, text)
    assert match, f"{pattern!r} is not in:\n{text}"
    return float(match[1])


@pytest.mark.parametrize("resets", [False, True])
def test_the_plain_gru_computes_the_same(example, resets):
    plain_gru, keys = example("plain_gru"), jax.random.split(jax.random.key(0), 4)
    gru = jaxgrad.nn.GRU(3, 5, 2, dtype=jnp.float64, key=keys[0])
    x, hx = jax.random.normal(keys[1], (7, 4, 3)), jax.random.normal(keys[2], (2, 4, 5))
    reset = jax.random.bernoulli(keys[3], 0.3, (7, 4)) if resets else None

    def loss(run, *arrays):
        y, h = run(*arrays, reset=reset)
        return (y**2).sum() + (h**3).sum()

    functions = plain_gru.run, jaxgrad.nn.GRU.__call__
    found, expected = (jax.jit(jax.value_and_grad(partial(loss, f), (0, 1, 2)))(gru, x, hx) for f in functions)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12), found, expected)


# --- the language model -------------------------------------------------------------------------------------------


def test_the_language_model_learns(run):
    """It must predict better than the frequencies of pairs of characters."""
    small = ["--steps", "150", "--length", "32", "--hidden", "64", "--learning-rate", "0.02"]
    text = run("train_char_gru", *small)
    unigram, bigram, gru = (
        _number(rf"{name}, test: ([\d.]+) bits", text) for name in ("unigram model", "bigram model", "GRU")
    )
    assert 2 < gru < bigram < unigram < 5
    assert re.search(r"sample: The .{300}\ncurves", text, re.DOTALL)


# --- the agent ----------------------------------------------------------------------------------------------------


def test_the_agent_remembers(run):
    """Without memory the mean return is at most 1/2."""
    text = run("train_recurrent_ppo", "--steps", "30")
    assert _number(r"mean return with memory: ([\d.]+)", text) > 0.8
    assert _number(r"mean return without memory: ([\d.]+)", text) < 0.6


def test_the_maze_requires_memory(example):
    """All policies without memory: an action for each observation."""
    t_maze = example("t_maze")
    policies = jnp.array(list(itertools.product(range(t_maze.ACTIONS), repeat=6)))
    keys = jax.random.split(jax.random.key(0), 32)

    def episode(policy, cue, key):
        def step(maze_and_end, key):
            maze, ended = maze_and_end
            cue, junction = t_maze.observe(maze).astype(int)
            maze, reward, done = t_maze.move(maze, policy[2 * (cue + 1) + junction], key)
            return (maze, ended | done), jnp.where(ended, 0, reward)

        start = t_maze.new(key)._replace(cue=cue), False
        (_, ended), rewards = jax.lax.scan(step, start, jax.random.split(key, t_maze.LIMIT))
        return rewards.sum(), ended

    of_mazes = jax.vmap(episode, (None, None, 0))
    of_cues = jax.vmap(of_mazes, (None, 0, None))
    returns, ended = jax.jit(jax.vmap(of_cues, (0, None, None)))(policies, jnp.arange(2), keys)
    assert ended.all()
    assert returns.mean((1, 2)).max() == 0.5
    assert {0, 1} == set(np.unique(returns))


# --- private training ---------------------------------------------------------------------------------------------


def test_private_training_learns(run, example):
    text = run("train_private", "--steps", "60", "--noise", "2")
    assert _number(r"test accuracy: ([\d.]+)% of 360 digits", text) > 80
    expected = example("train_private").epsilon(256 / 1437, 2, 60, 1e-5)
    assert _number(r"privacy: epsilon ([\d.]+) at delta 1e-05", text) == pytest.approx(expected, abs=0.01)


def test_private_gradients_are_clipped_one_by_one(example):
    script, keys, count = example("train_private"), jax.random.split(jax.random.key(0), 4), 5
    params = {**script.initial_params(keys[0]), "head_w": 0.1 * jax.random.normal(keys[1], (512, 10))}
    images, labels, sampled = jax.random.uniform(keys[2], (6, 8, 8)), jnp.arange(6), jnp.arange(6) < count
    gradient = jax.jit(lambda *example: ravel_pytree(jax.grad(script.loss_fn)(params, *example))[0])
    rows = [np.array(gradient(*example)) for example in zip(images[:count], labels, strict=False)]
    norms = [np.linalg.norm(row) for row in rows]
    clip = float(np.median(norms))
    expected = sum(row * min(1, clip / length) for row, length in zip(rows, norms, strict=True))

    @jax.jit
    def private_sum(noise):
        return ravel_pytree(script.private_sum(params, (images, labels, sampled), keys[3], clip, noise))[0]

    np.testing.assert_allclose(private_sum(0), expected, rtol=1e-5, atol=1e-6)
    noise = np.array(private_sum(3) - private_sum(0))
    assert noise.std() == pytest.approx(3 * clip, rel=0.03)
    assert abs(noise.mean()) < 0.1 * clip


@pytest.mark.parametrize("noise", [0.8, 2, 6])
@pytest.mark.parametrize("steps", [1, 50])
def test_epsilon_of_whole_batches(example, noise, steps):
    """The exact delta of Gaussian noise: Balle and Wang, "Improving the Gaussian Mechanism" (2018), theorem 8."""
    epsilon, mu = example("train_private").epsilon(1, noise, steps, 1e-5), steps**0.5 / noise

    def delta(epsilon):
        return norm.cdf(mu / 2 - epsilon / mu) - np.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)

    assert delta(epsilon) <= 1e-5 < delta(0.8 * epsilon)


@pytest.mark.parametrize(("rate", "noise"), [(0.2, 1), (0.2, 3), (0.7, 2)])
def test_epsilon_of_a_sample(example, rate, noise):
    """The exact delta of a single step, by integration, if a digit is removed and if one is added."""
    epsilon = example("train_private").epsilon(rate, noise, 1, 1e-5)
    x = np.linspace(-12 * noise, 12 * noise + 1, 100_001)
    without = norm.pdf(x, 0, noise)
    with_digit = (1 - rate) * without + rate * norm.pdf(x, 1, noise)

    def delta(epsilon):
        pairs = (with_digit, without), (without, with_digit)
        return max(np.trapezoid(np.maximum(0, p - np.exp(epsilon) * q), x) for p, q in pairs)

    assert delta(epsilon) <= 1e-5 < delta(0.6 * epsilon)


# --- fine-tuning from PyTorch -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("torch")
def test_fine_tuning_from_pytorch(run):
    small = ["--torch-steps", "100", "--steps", "60", "--hidden", "64", "--save", "tuned.pt"]
    text = run("fine_tune_torch_gru", *small)
    before, random, tuned, after = (
        _number(rf"{name}, with noise: ([\d.]+)% of 360 test digits", text)
        for name in (
            "PyTorch",
            "jaxgrad, from random weights",
            "jaxgrad, from PyTorch's weights",
            "PyTorch with the new weights",
        )
    )
    assert before < tuned == after
    assert tuned > random + 5
    assert _number(r"the logits differ by at most ([\de.-]+)", text) < 1e-5
    again = run("fine_tune_torch_gru", "--weights", "tuned.pt", "--steps", "1", "--hidden", "64")
    assert _number(r"PyTorch, with noise: ([\d.]+)%", again) == tuned
    with pytest.raises(SystemExit):
        run("fine_tune_torch_gru", "--weights", "tuned.pt", "--hidden", "32")


def test_fine_tuning_without_pytorch(example, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "fine_tune_torch_gru", raising=False)
    with pytest.raises(SystemExit, match=r"requires PyTorch.*: pip install torch"):
        example("fine_tune_torch_gru")


# --- arguments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("train_char_gru", ["--hidden", "0"], "argument --hidden: must be a positive integer, got 0"),
        ("train_char_gru", ["--length", "20000"], "--batch-size times --length must be less than "),
        ("train_recurrent_ppo", ["--environments", "6"], "argument --environments: must be a multiple of 4, got 6"),
        ("train_recurrent_ppo", ["--plot", "plot.pdf"], "argument --plot: must be a .png file"),
        ("train_private", ["--noise", "-1"], "argument --noise: must be a positive number, got -1"),
        ("train_private", ["--batch-size", "1438"], "argument --batch-size: must be at most the 1437 digits, got 1438"),
    ],
)
def test_invalid_arguments(run_example, capsys, name, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        run_example(name, *arguments)
    assert message in capsys.readouterr().err
