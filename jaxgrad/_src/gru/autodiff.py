"""The differentiation rules of the GRU: the `jax.custom_vjp` functions around the calls of `_gru_units`."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxgrad import _gru_units as units
from jaxgrad import _gru_xla
from jaxgrad._forward_maps import Rules
from jaxgrad._gru_xla import Gradients
from jaxgrad._symbolic_zeros import known, values_and_wanted

_NAME = "jaxgrad.gru"  # what policies of `jax.checkpoint` know its differentiated results by


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gru(spec, x, w, r, b, sequence_lens, initial_h):
    """`(y, y_h)`; without differentiation no residuals are kept."""
    y, y_h, _ = units.forward_unit(spec, False)(x, w, r, b, sequence_lens, initial_h)
    return y, y_h


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gru_training(spec, x, w, r, b, sequence_lens, initial_h):
    """`(y, y_h, gates)`. The gates are a function of the inputs, which the rules follow: they get no gradient."""
    return units.forward_unit(spec, True)(x, w, r, b, sequence_lens, initial_h)


def _training_fwd(spec, x, w, r, b, sequence_lens, initial_h):
    values, wanted = values_and_wanted(x, w, r, b, sequence_lens, initial_h)
    y, y_h, gates = checkpoint_name(_gru_training(spec, *values), _NAME)
    return (y, y_h, gates), (values, y, gates, wanted)


def _gru_fwd(spec, *primals):
    (y, y_h, _), residuals = _training_fwd(spec, *primals)
    return (y, y_h), residuals


def _gru_bwd(spec, residuals, cotangents):
    (x, w, r, b, sequence_lens, initial_h), y, gates, wanted = residuals
    dy, dy_h = map(known, cotangents[:2])
    flags = (*wanted.flags[:4], wanted.flags[5])  # lengths have no gradient
    gradients = _gru_backward(spec, flags, x, w, r, b, sequence_lens, initial_h, y, gates, dy, dy_h)
    return gradients.x, gradients.w, gradients.r, gradients.b, None, gradients.initial_h


def _formula(spec, *arrays):
    return _gru_xla.forward(*arrays, **spec.attributes, training=False)[:2]


def _differentiated(spec, *arrays):
    return _gru_training(spec, *arrays)[:2]


def _gradient_formula(spec, arrays, cotangents, wanted):
    """By the hand-written backward pass, whose derivatives are faster than those of the scan's own reverse mode."""
    x, w, r, _, sequence_lens, initial_h = arrays
    y, _, gates = _gru_xla.forward(*arrays, **spec.attributes, training=True)
    flags = tuple(bool(flag) for i, flag in enumerate(wanted) if i != 4)  # lengths have none
    residuals = (x, w, r, sequence_lens, initial_h, y, gates, cotangents.get(0), cotangents.get(1))
    found = _gru_xla.backward(*residuals, **spec.attributes, wanted=flags)
    return found.x, found.w, found.r, found.b, None, found.initial_h


FORWARD_MODE = Rules(formula=_formula, gradient=_gradient_formula, differentiated=_differentiated)
gru.defvjp(_gru_fwd, _gru_bwd, symbolic_zeros=True)
_gru_training.defvjp(_training_fwd, _gru_bwd, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gru_backward(spec, wanted, x, w, r, b, sequence_lens, initial_h, y, gates, dy, dy_h):
    return Gradients(*units.backward_unit(spec, wanted)(x, w, r, sequence_lens, initial_h, y, gates, dy, dy_h))


def _gru_backward_fwd(spec, wanted, *args):
    return _gru_backward(spec, wanted, *args), args


def _gru_backward_bwd(spec, wanted, args, cotangents):
    """Gradients of gradients, by differentiating XLA's backward pass through its forward scan.

    y and gates get none: they are functions of the inputs, and the scan that is differentiated here computes them anew.
    """
    x, w, r, b, sequence_lens, initial_h, _, _, dy, dy_h = args

    def gradients(inputs, dy, dy_h):
        def outputs(inputs):
            x, w, r, b, initial_h = inputs
            return _formula(spec, x, w, r, b, sequence_lens, initial_h)

        (y, y_h), pullback = jax.vjp(outputs, inputs)
        (found,) = pullback((jnp.zeros_like(y) if dy is None else dy, jnp.zeros_like(y_h) if dy_h is None else dy_h))
        return Gradients(*(g if want else None for g, want in zip(found, wanted, strict=True)))

    _, pullback = jax.vjp(gradients, (x, w, r, b, initial_h), dy, dy_h)
    (x, w, r, b, initial_h), dy, dy_h = pullback(cotangents)
    return x, w, r, b, None, initial_h, None, None, dy, dy_h


_gru_backward.defvjp(_gru_backward_fwd, _gru_backward_bwd)
