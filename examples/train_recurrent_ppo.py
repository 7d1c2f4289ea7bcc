"""Trains an agent that must remember, by proximal policy optimization (PPO) with a GRU.

In the T-maze of t_maze.py, a cue at the first step says where to turn at the end of a corridor. A training step is one
jitted function: a rollout, where the GRU takes single steps in E environments, then the updates, where one call of the
GRU takes all steps. `reset` clears the hidden state at the first step of each episode. The script also trains a policy
without memory, by a reset at every step. The mean return of any such policy is at most 1/2.

  pip install ".[examples]"
  python examples/train_recurrent_ppo.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import plain_gru
import t_maze
import training
from jax import lax
from matplotlib.figure import Figure

import jaxgrad.nn

H, T = 64, 128  # hidden units, steps of a rollout
EPOCHS, MINIBATCHES = 4, 4  # how often an update takes the rollout, and in how many parts
DISCOUNT, GAE, CLIP, ENTROPY = 0.99, 0.95, 0.2, 0.01
Params = dict[str, Any]  # "gru" of H hidden units, "actor" [H, 3], "critic" [H]


class State(NamedTuple):
    """All that a training step takes and returns."""

    learned: tuple[Params, Any]  # and the state of the optimizer
    actors: tuple[t_maze.Maze, jax.Array, jax.Array]  # mazes, whether an episode begins [E], hidden states [1, E, H]
    key: jax.Array


class Rollout(NamedTuple):
    """T steps in E environments: arrays [T, E, ...]."""

    observations: jax.Array
    reset: jax.Array  # whether the hidden state was cleared before the step
    actions: jax.Array
    log_probs: jax.Array  # of the actions
    values: jax.Array
    rewards: jax.Array
    done: jax.Array


def evaluate(run: Callable[..., Any], params: Params, observations: jax.Array, h: jax.Array, reset: jax.Array) -> Any:
    """Log probabilities of the actions [T, E, 3], values [T, E] and the next hidden states of T steps."""
    y, h = run(params["gru"], observations, h, reset=reset)
    return jax.nn.log_softmax(y @ params["actor"]), y @ params["critic"], h


def estimate_advantages(rollout: Rollout, last_values: jax.Array) -> jax.Array:
    """Generalized advantage estimates (Schulman et al., 2016), [T, E]."""

    def step(after: tuple[jax.Array, jax.Array], now: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
        (advantage, next_value), (value, reward, done) = after, now
        advantage = reward - value + DISCOUNT * (1 - done) * (next_value + GAE * advantage)
        return (advantage, value), advantage

    steps = rollout.values, rollout.rewards, rollout.done
    return lax.scan(step, (jnp.zeros_like(last_values), last_values), steps, reverse=True)[1]


def ppo_loss(run: Callable[..., Any], params: Params, h: jax.Array, old: Rollout, advantages: jax.Array) -> Any:
    """The loss on a rollout, with the hidden states h before it: all steps are one call of the GRU."""
    log_probs, values, _ = evaluate(run, params, old.observations, h, old.reset)
    ratio = jnp.exp((log_probs * jax.nn.one_hot(old.actions, t_maze.ACTIONS)).sum(-1) - old.log_probs)
    normal = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    surrogate = jnp.minimum(ratio * normal, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * normal)
    entropy = -(jnp.exp(log_probs) * log_probs).sum(-1)
    return (0.5 * jnp.square(values - old.values - advantages) - surrogate - ENTROPY * entropy).mean()


def training_step(run: Callable[..., Any], optimizer: optax.GradientTransformation, memory: bool) -> training.Step:
    def act(params: Params, actors: tuple[Any, ...], key: jax.Array) -> tuple[Any, Rollout]:
        mazes, starts, h = actors
        keys, reset = jax.random.split(key, 1 + len(starts)), starts | (not memory)
        observations = jax.vmap(t_maze.observe)(mazes)
        log_probs, values, h = evaluate(run, params, observations[None], h, reset[None])
        actions = jax.random.categorical(keys[0], log_probs[0])
        chosen = (log_probs[0] * jax.nn.one_hot(actions, t_maze.ACTIONS)).sum(-1)
        mazes, rewards, done = jax.vmap(t_maze.move)(mazes, actions, keys[1:])
        return (mazes, done, h), Rollout(observations, reset, actions, chosen, values[0], rewards, done)

    def step(state: State) -> tuple[State, dict[str, jax.Array]]:
        key, *keys = jax.random.split(state.key, 4)
        (params, _), (_, starts, h) = state.learned, state.actors
        actors, rollout = lax.scan(partial(act, params), state.actors, jax.random.split(keys[0], T))
        advantages = estimate_advantages(rollout, act(params, actors, keys[1])[1].values)

        def update(learned: tuple[Any, Any], rows: jax.Array) -> tuple[Any, None]:
            params, optimizer_state = learned
            batch = jax.tree.map(lambda array: array[:, rows], (h, rollout, advantages))
            gradients = jax.grad(partial(ppo_loss, run))(params, *batch)
            updates, optimizer_state = optimizer.update(gradients, optimizer_state)
            return (optax.apply_updates(params, updates), optimizer_state), None

        orders = jax.vmap(partial(jax.random.permutation, x=len(starts)))(jax.random.split(keys[2], EPOCHS))
        learned, _ = lax.scan(update, state.learned, orders.reshape(EPOCHS * MINIBATCHES, -1))
        mean_return = rollout.rewards.sum() / jnp.maximum(rollout.done.sum(), 1)
        return State(learned, actors, key), {"with memory" if memory else "without memory": mean_return}

    return step


def main(arguments: Sequence[str] | None = None) -> None:
    description, plot = "Trains an agent in a T-maze.", "train_recurrent_ppo.png"
    parser = training.argument_parser(description, steps=100, learning_rate=3e-3, plot=plot)
    parser.add_argument("--environments", type=training.positive_int, default=64, help=f"a multiple of {MINIBATCHES}")
    args = parser.parse_args(arguments)
    if (E := args.environments) % MINIBATCHES:
        parser.error(f"argument --environments: must be a multiple of {MINIBATCHES}, got {E}")

    keys = jax.random.split(jax.random.key(args.seed), 4)
    actor = 0.01 * jax.random.normal(keys[1], (H, t_maze.ACTIONS))
    params = {"gru": jaxgrad.nn.GRU(2, H, key=keys[0]), "actor": actor, "critic": jnp.zeros(H)}
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(args.learning_rate, eps=1e-5))
    actors = jax.vmap(t_maze.new)(jax.random.split(keys[2], E)), jnp.ones(E, bool), jnp.zeros((1, E, H))
    state = State((params, optimizer.init(params)), actors, keys[3])

    curves = {}
    for memory in (False, True):
        step, plain = (training_step(run, optimizer, memory) for run in (jaxgrad.nn.GRU.__call__, plain_gru.run))
        trained, history = training.fit(step, state, lambda rng: (), args)
        curves.update(history)
    training.print_step_times(plain, step, trained)

    print(jaxgrad.explain(jaxgrad.gru))
    for name, returns in curves.items():
        print(f"mean return {name}: {returns[-max(1, args.steps // 10) :].mean():.3f} (last tenth of the training)")
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.axhline(0.5, color="gray", linestyle="--", label="bound without memory")
    training.draw_curves(axes, curves, "mean return")
    figure.savefig(args.plot, dpi=150)
    print(f"curves: {args.plot}")


if __name__ == "__main__":
    main()
