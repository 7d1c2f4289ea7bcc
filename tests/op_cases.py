"""Every op as a function of its float arrays, with small inputs and a reference in plain JAX."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import batch_norm_references
import gru_references
import jax
import jax.numpy as jnp
import numpy as np
from batch_norm_references import plain_inference, plain_training
from conv_cases import FIELDS, ConvCase, make_conv_inputs
from conv_references import lax_conv
from conv_transpose_cases import TransposeCase, lax_conv_transpose, make_transpose_inputs
from gru_cases import Case, make_inputs
from norm_cases import NormCase
from norm_cases import make_inputs as make_norm_inputs
from pool_cases import PoolCase
from pool_cases import make_inputs as make_pool_inputs

import jaxgrad


class OpCase(NamedTuple):
    """One op and one call of it."""

    op: Callable[..., Any]
    names: tuple[str, ...]  # argument names of the arrays
    settings: dict[str, Any]
    plain: Callable[..., Any]  # reference in plain JAX
    arrays: tuple[np.ndarray, ...]  # float32
    kernel: str  # the CPU handler of the forward pass

    def call(self, implementation: str | None) -> Callable[..., Any]:
        """The call on an implementation; "cpu" stands for that of the CPU handler, which for convolutions is oneDNN."""
        if implementation == "cpu" and "onednn" in self.kernel:
            implementation = "onednn"

        def function(*arrays):
            named = dict(zip(self.names, arrays, strict=True))
            return self.op(**named, **self.settings, implementation=implementation)

        return function


def _conv(size: int) -> OpCase:
    case = ConvCase(
        spatial=(3 + size, 4), features=2, out_features=3, groups=2, strides=(2, 1), padding=((1, 0), (0, 2))
    )
    inputs, linear = make_conv_inputs(case), lax_conv(case)
    op, settings = jaxgrad.conv_general_dilated, {**case.settings, "activation": "relu"}

    def plain(lhs, rhs, bias):
        return jax.nn.relu(linear(lhs, rhs, bias))

    return OpCase(op, FIELDS, settings, plain, tuple(inputs), "jaxgrad_onednn_conv_forward")


def _conv_transpose(size: int) -> OpCase:
    case = TransposeCase(spatial=(2 + size, 4), features=2, out_features=3, strides=(1, 2))
    inputs, plain = make_transpose_inputs(case), lax_conv_transpose(case)
    op = jaxgrad.conv_transpose
    return OpCase(op, FIELDS, case.settings, plain, tuple(inputs), "jaxgrad_onednn_conv_input_gradient")


def _batch_norm_training(size: int) -> OpCase:
    case = batch_norm_references.Case((4, 2 + size, 3), residual=True, activation="relu")

    def plain(x, scale, bias, residual):
        return tuple(plain_training(x, scale, bias, residual, **case.settings))

    inputs, _ = batch_norm_references.make_inputs(case)
    op = jaxgrad.batch_norm_training
    return OpCase(op, inputs._fields, case.settings, plain, tuple(inputs), "jaxgrad_cpu_norm_forward")


def _batch_norm_inference(size: int) -> OpCase:
    case = batch_norm_references.Case((4, 2 + size, 3))
    x, scale, bias, _ = batch_norm_references.make_inputs(case)[0]
    settings = {"feature_axis": case.feature_axis, "epsilon": batch_norm_references.EPSILON}
    arrays = (x, scale, bias, np.float32(0.2) + bias, np.float32(0.3) + scale**2)
    names, plain = ("x", "scale", "bias", "mean", "var"), partial(plain_inference, **settings)
    return OpCase(jaxgrad.batch_norm_inference, names, settings, plain, arrays, "jaxgrad_cpu_norm_normalize")


def _norm(name: str, size: int) -> OpCase:
    case = NormCase(name, (4, 2 + size, 6), activation="silu", given=("scale", "bias", "residual"))
    inputs, _ = make_norm_inputs(case)
    return OpCase(
        getattr(jaxgrad, name), inputs._fields, case.settings, case.plain, tuple(inputs), "jaxgrad_cpu_norm_forward"
    )


def _gru(size: int) -> OpCase:
    case = Case(T=2 + size, B=2, I=3, H=4, direction="bidirectional", linear_before_reset=True)
    inputs, _ = make_inputs(case, "float32")
    settings = {**case.settings, "sequence_lens": inputs.sequence_lens, "reset": inputs.reset}

    def plain(x, w, r, b, initial_h, reset_h):
        arrays = inputs._replace(x=x, w=w, r=r, b=b, initial_h=initial_h, reset_h=reset_h)
        return gru_references.forward(*arrays, **case.settings)

    names = ("x", "w", "r", "b", "initial_h", "reset_h")
    arrays = tuple(getattr(inputs, name) for name in names)
    return OpCase(jaxgrad.gru, names, settings, plain, arrays, "jaxgrad_cpu_gru_forward")


def _max_pool(size: int) -> OpCase:
    case = PoolCase(spatial=(3 + size, 4))
    x, _ = make_pool_inputs(case, "float32", special=False)
    op, settings = jaxgrad.max_pool, case.op().keywords
    return OpCase(op, ("inputs",), settings, case.lax, (x,), "jaxgrad_cpu_max_pool_forward")


def _avg_pool(size: int) -> OpCase:
    case = PoolCase(spatial=(3 + size, 4), channels_last=False)
    x, _ = make_pool_inputs(case, "float32", special=False)
    settings = {**case.op().keywords, "count_include_pad": False}
    plain = partial(case.lax_mean, count_include_pad=False)
    return OpCase(jaxgrad.avg_pool, ("inputs",), settings, plain, (x,), "jaxgrad_cpu_sum_pool_forward")


NORMS = ("group_norm", "layer_norm", "rms_norm")
_MAKERS: dict[str, Callable[[int], OpCase]] = {
    "conv_general_dilated": _conv,
    "conv_transpose": _conv_transpose,
    "batch_norm_training": _batch_norm_training,
    "batch_norm_inference": _batch_norm_inference,
    "gru": _gru,
    "max_pool": _max_pool,
    "avg_pool": _avg_pool,
    **{name: partial(_norm, name) for name in NORMS},
}
OPS = tuple(_MAKERS)


def op_case(name: str, size: int = 3) -> OpCase:
    """A call of the op; `size` is the length of one axis."""
    return _MAKERS[name](size)


def loss(outputs: Any) -> Any:
    """A scalar, nonlinear in every result, with a different weight for each element.

    Its own products are exact on a GPU too, where JAX's default rounds to TF32.
    """
    return sum(
        jnp.vdot(jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape), jnp.sin(y), precision="highest")
        for y in jax.tree.leaves(outputs)
    )


def values_and_gradients(function: Callable[..., Any], *arrays: Any) -> Any:
    """`((loss, outputs), gradients)` of `loss(function(*arrays))` by all arrays."""

    def of_all(*arrays):
        outputs = function(*arrays)
        return loss(outputs), outputs

    return jax.value_and_grad(of_all, argnums=tuple(range(len(arrays))), has_aux=True)(*arrays)
