"""JAX's transformations as functions of a function and its arrays, for comparison of two implementations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from op_cases import loss, values_and_gradients


def value_and_grad(function, arrays):
    return values_and_gradients(function, *arrays)


def vjp(function, arrays):
    """One pullback, called with two cotangents."""
    outputs, pullback = jax.vjp(function, *arrays)
    cotangents = jax.tree.map(jnp.cos, outputs)
    return outputs, pullback(cotangents), pullback(jax.tree.map(jnp.sin, cotangents))


def jacrev(function, arrays):
    """The Jacobian with respect to all arrays but the first, which would make it large."""
    return jax.jacrev(function, argnums=tuple(range(1, len(arrays))))(*arrays)


def jacfwd(function, arrays):
    """As `jacrev`, by forward mode."""
    return jax.jacfwd(function, argnums=tuple(range(1, len(arrays))))(*arrays)


def jvp(function, arrays):
    """The derivatives along one tangent of every array."""
    return jax.jvp(function, arrays, tuple(map(jnp.cos, arrays)))


def linearize(function, arrays):
    """One linear function, called with two tangents."""
    outputs, tangent_of = jax.linearize(function, *arrays)
    return outputs, tangent_of(*map(jnp.cos, arrays)), tangent_of(*map(jnp.sin, arrays))


def linear_transpose(function, arrays):
    """The transpose in the last array, in which the function must be linear."""
    *others, last = arrays
    cotangent = jnp.cos(function(*arrays))
    return jax.linear_transpose(lambda last: function(*others, last), last)(cotangent)


def hessian(function, arrays):
    """Forward over reverse mode, by a scale for each slice of the last array."""
    *others, last = arrays
    scales = jnp.arange(1.0, 1 + last.shape[0], dtype=last.dtype).reshape(-1, *[1] * (last.ndim - 1))
    return jax.hessian(lambda scales: loss(function(*others, last * scales)))(scales)


def gradients_of_a_gradient_penalty(function, arrays):
    """Reverse mode twice, by every array."""
    every = tuple(range(len(arrays)))

    def penalty(*arrays):
        gradients = jax.grad(lambda *arrays: loss(function(*arrays)), every)(*arrays)
        return sum(jnp.vdot(g, g, precision="highest") for g in gradients)

    return jax.grad(penalty, every)(*arrays)


def scan(function, arrays):
    """Each step reads the result of the previous step and has its own weights."""
    first, second, *others = arrays
    stacked = jnp.stack([second, second / 2, -second])

    def of_both(first, stacked):
        def step(carry, weights):
            outputs = function(first * (1 + jnp.tanh(carry) / 8), weights, *others)
            return loss(outputs) / 16, outputs

        return loss(lax.scan(step, jnp.sum(first) * 0, stacked))

    return jax.value_and_grad(of_both, argnums=(0, 1))(first, stacked)


def while_loop(function, arrays):
    """The result of one iteration scales the input of the next."""

    def turn(carry):
        count, scale = carry
        return count + 1, loss(function(arrays[0] * (1 + jnp.tanh(scale) / 8), *arrays[1:])) / 16

    return lax.while_loop(lambda carry: carry[0] < 3, turn, (0, jnp.sum(arrays[0]) * 0))[1]


def cond(function, arrays):
    """Both branches in turn, with the gradients of the branch that runs."""

    def chosen(arrays, sign):
        return lax.cond(sign > 0, lambda arrays: loss(function(*arrays)), loss, arrays)

    return [jax.value_and_grad(chosen)(arrays, jnp.asarray(sign)) for sign in (1, -1)]


def nested_vmap(function, arrays):
    """Two independent problems along the first array, times three along the second."""
    first, second = jnp.stack([arrays[0], arrays[0] / 2]), jnp.stack([arrays[1], arrays[1] / 2, -arrays[1]])
    inner = jax.vmap(lambda a, b: values_and_gradients(function, a, b, *arrays[2:]), in_axes=(None, 0))
    return jax.vmap(inner, in_axes=(0, None))(first, second)
