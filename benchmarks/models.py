"""Training steps of models in flax and equinox, as they are and under `jaxgrad.accelerate`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, subjaxprs

import jaxgrad
from benchmarks import case_text, lax_variants
from benchmarks.compare import Work, compare, precision_in_use
from benchmarks.contender_names import ACCELERATED, BEST_FLAGS, LAX, LAX_DILATED
from benchmarks.framework_models import CLASSES, MODELS
from benchmarks.measuring import measured
from benchmarks.options import Options
from benchmarks.timing import jax_loop_contenders, raised, timed

_FLAGGED = (LAX + BEST_FLAGS, LAX_DILATED + BEST_FLAGS)
CONTENDERS = (ACCELERATED, LAX, LAX_DILATED, *_FLAGGED)
NOTES = (
    "Cases are a model of benchmarks/framework_models, its batch and the sizes of its input.",
    "A step is the loss, all gradients, SGD with momentum and the running statistics of batch normalization, in place.",
    "jax.lax is the step of the framework under jax.jit; jax.lax, accelerated is the same step under "
    "jaxgrad.accelerate. jax.lax after lax.pad is that step with transposed convolutions whose input lax.pad dilates.",
    "best flags are those of lax_variants.py, on a CPU.",
)
# Limits of ||a - b|| / ||b|| of the loss and of each array of the state, as in steps.py.
_TOLERANCES = {"float32": (1e-4, 1e-2), "TF32": (3e-3, 0.25), "bfloat16": (2e-2, 0.6)}


@dataclasses.dataclass(frozen=True)
class Case:
    model: str
    batch: int
    size: int  # of every spatial axis of the input
    dtype: str = "float32"
    extra: bool = False

    @property
    def label(self) -> str:
        sizes = "x".join(map(str, (self.batch, *(self.size,) * MODELS[self.model].spatial)))
        return f"{self.model} {sizes}" + (" bf16" if self.dtype == "bfloat16" else "")


CASES = {
    "cpu": (
        Case("nnx-resnext", 4, 32),
        Case("linen-unet", 1, 64),
        Case("linen-unet3d", 1, 16),
        Case("equinox-autoencoder", 8, 32),
    ),
    "gpu": tuple(
        Case(model, batch, size, dtype)
        for model, batch, size in (
            ("linen-unet3d", 2, 64),
            ("linen-unet", 16, 256),
            ("equinox-autoencoder", 128, 64),
            ("nnx-convnext-t", 64, 224),
            ("nnx-resnext50", 64, 224),
        )
        for dtype in ("bfloat16", "float32")
    ),
}
QUICK_CASES = (
    Case("nnx-resnext", 2, 8),
    Case("linen-unet", 1, 8),
    Case("linen-unet3d", 1, 8, "bfloat16"),
    Case("equinox-autoencoder", 2, 8),
)


def parse_case(text: str) -> Case:
    """model,batch,size or model,batch,size,bf16; models are those in benchmarks/framework_models/__init__.py"""
    model, sizes, dtype = case_text.parse(text, MODELS, 2, parse_case.__doc__)
    return Case(model, *sizes, dtype)


def measure(cases: Sequence[Case], options: Options) -> dict[str, Any]:
    """The report (report.py). A case without its framework is left out."""
    left_out = lax_variants.left_out(_FLAGGED, options)

    def rows_of(case: Case) -> list[dict[str, Any]]:
        if MODELS[case.model].is_installed:
            return [_row(case, left_out, options)]
        left_out[case.label] = f"{MODELS[case.model].package} is not installed"
        print(f"  left out: {left_out[case.label]}", flush=True)
        return []

    return measured("models", cases, rows_of, [jaxgrad.explain(jaxgrad.conv_general_dilated)], NOTES, left_out)


def _row(case: Case, left_out: dict[str, str], options: Options) -> dict[str, Any]:
    model = MODELS[case.model]
    x = jax.ShapeDtypeStruct(model.shape(case.batch, case.size, model.features), case.dtype)
    training = timed("model: ready", partial(model.training, x))
    args = (training.state, *_batch(case))
    names = lax_variants.with_flags([LAX, *([LAX_DILATED] if model.transposed else [])], left_out)
    accelerated = jaxgrad.accelerate(training.step)
    steps = {ACCELERATED: accelerated, **{name: partial(training.step) for name in names if options.wants(name)}}
    in_force = {name: lax_variants.context_of(name) for name in steps}
    made = partial(jax_loop_contenders, steps, *args, in_force=in_force)
    contenders = raised(timed(f"{', '.join(steps)}: ready", made))
    print(f"  convolutions: {jaxgrad.report(accelerated, *args).counts}", flush=True)
    work = Work(
        label=case.label,
        measure="training step",
        settings=dataclasses.asdict(case),
        dtype=case.dtype,
        flops=_flops(jax.jit(training.step).trace(*args).jaxpr.jaxpr),
        array_bytes={"state": sum(leaf.nbytes for leaf in jax.tree.leaves(training.state))},
        extra=case.extra,
    )
    loss, array = _TOLERANCES[precision_in_use(case.dtype)]
    tolerances = [*[array] * (len(contenders[0].outputs) - 1), loss]
    return timed("measured", partial(compare, work, contenders, options.effort, tolerances))


def _batch(case: Case) -> tuple[jax.Array, jax.Array]:
    model, rng = MODELS[case.model], np.random.default_rng(1)

    def normal(features: int, dtype: str) -> jax.Array:
        return jnp.asarray(rng.standard_normal(model.shape(case.batch, case.size, features), np.float32), dtype)

    x = normal(model.features, case.dtype)
    target = jnp.asarray(rng.integers(0, CLASSES, case.batch)) if model.classifies else normal(model.outputs, "float32")
    return x, target


def _flops(jaxpr: Jaxpr) -> int:
    """Operations of the convolutions and matrix products of a program, except those on zeros of an input dilation."""
    found = sum(map(_flops, subjaxprs(jaxpr)))
    for equation in jaxpr.eqns:
        result = math.prod(equation.outvars[0].aval.shape)
        if equation.primitive is jax.lax.conv_general_dilated_p:
            rhs, dn = equation.invars[1].aval.shape, equation.params["dimension_numbers"]
            products = math.prod(rhs) // rhs[dn.rhs_spec[0]]
            found += 2 * result * products // math.prod(equation.params["lhs_dilation"])
        elif equation.primitive is jax.lax.dot_general_p:
            (contracted, _), _ = equation.params["dimension_numbers"]
            found += 2 * result * math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
    return found
