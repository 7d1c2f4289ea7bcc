"""A T-maze: an environment that requires memory (Bakker, "Reinforcement Learning with Long Short-Term Memory", 2001).

The first observation of an episode is a cue, left or right. The agent walks along a corridor of random length to a
junction, and turns. The return is 1 if it turns to the side of the cue, and 0 otherwise. All junctions look alike, so
that the mean return of a policy without memory is at most 1/2. The functions take one maze: `jax.vmap` makes many.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

CORRIDOR, LIMIT = 10, 30  # the longest corridor, half of it the shortest; the most steps of an episode
LEFT, RIGHT, WALK = range(3)  # the actions
ACTIONS = 3


class Maze(NamedTuple):
    """An environment; every array is a scalar."""

    cue: jax.Array  # LEFT or RIGHT, the action that is rewarded at the junction
    length: jax.Array
    position: jax.Array
    time: jax.Array


def new(key: jax.Array) -> Maze:
    keys = jax.random.split(key)
    length = jax.random.randint(keys[1], (), CORRIDOR // 2, CORRIDOR + 1)
    return Maze(jax.random.randint(keys[0], (), LEFT, RIGHT + 1), length, jnp.array(0), jnp.array(0))


def observe(maze: Maze) -> jax.Array:
    cue = jnp.where(maze.time == 0, 2.0 * maze.cue - 1, 0)
    return jnp.stack([cue, jnp.where(maze.position == maze.length, 1.0, 0)])


def move(maze: Maze, action: jax.Array, key: jax.Array) -> tuple[Maze, jax.Array, jax.Array]:
    """The next maze, a new one at the end of an episode; the reward; whether the episode has ended."""
    junction = maze.position == maze.length
    turned = junction & (action != WALK)
    reward = jnp.where(turned & (action == maze.cue), 1.0, 0)
    done = turned | (maze.time + 1 == LIMIT)
    moved = maze._replace(position=maze.position + (~junction & (action == WALK)), time=maze.time + 1)
    return jax.tree.map(partial(jnp.where, done), new(key), moved), reward, done
