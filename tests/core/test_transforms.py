"""The table of docs/transformations.md: every op under every transformation, compared with plain JAX.

The table also names tests in the folders of the ops, which are not repeated here.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import transformations
from backends import CPU_KERNEL, Backend, float64_on_cpu
from op_cases import NORMS, OPS, op_case, values_and_gradients
from thorough import oldest_one_in
from tolerances import assert_close, chained_rounding, input_dtype

from jaxgrad._src.native import cuda

pytestmark = pytest.mark.jax_version

BACKENDS = (CPU_KERNEL, Backend(None, "gpu"))
_TABLE = Path(__file__).parents[2] / "docs" / "transformations.md"
CONVOLUTIONS, BATCH_NORMS = OPS[:2], OPS[2:4]


# name: (function(f, arrays), whose result must be equal for an op and for plain JAX; the ops tested here).
TRANSFORMATIONS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "value_and_grad": (transformations.value_and_grad, OPS),
    "vjp": (transformations.vjp, ("conv_transpose", *BATCH_NORMS, "rms_norm")),
    "jacrev": (transformations.jacrev, (*CONVOLUTIONS, *BATCH_NORMS, "layer_norm")),
    "scan": (transformations.scan, ("conv_transpose", "batch_norm_inference", "group_norm")),
    "while_loop": (transformations.while_loop, ("conv_transpose", *BATCH_NORMS, "rms_norm")),
    "cond": (transformations.cond, ("conv_transpose", *BATCH_NORMS, "layer_norm")),
    "nested_vmap": (transformations.nested_vmap, ("batch_norm_inference", "group_norm")),
}


@cache
def _expected(name: str, op: str) -> Any:
    """The result of plain JAX in float64."""
    transformation, _ = TRANSFORMATIONS[name]
    case = op_case(op)
    with float64_on_cpu():
        return jax.jit(partial(transformation, case.plain))(_wide(case.arrays))


@cache
def _jitted(op: str, implementation: str | None) -> Any:
    return jax.jit(partial(values_and_gradients, op_case(op).call(implementation)))


def _close(found: Any, expected: Any, dtype: str = "float32", rounding: str | None = None) -> None:
    jax.tree.map(lambda a, b: assert_close(a, b, dtype=dtype, terms=100, rounding=rounding), found, expected)


def _wide(arrays: Any) -> Any:
    return jax.tree.map(lambda a: np.asarray(a, np.float64), arrays)


@pytest.mark.parametrize(("name", "op"), [(name, op) for name, (_, ops) in TRANSFORMATIONS.items() for op in ops])
def test_matches_plain_jax(backend, name, op):
    transformation, _ = TRANSFORMATIONS[name]
    case = op_case(op)
    found = jax.jit(partial(transformation, case.call(backend.implementation)))(backend.put(case.arrays))
    _close(found, _expected(name, op), rounding=chained_rounding(None if op in BATCH_NORMS + NORMS else backend))


ARRAYS = op_case("batch_norm_inference").names
SUBSETS = [names for n in range(1, 1 + len(ARRAYS)) for names in itertools.combinations(ARRAYS, n)]


@pytest.mark.parametrize("names", oldest_one_in(5, SUBSETS), ids="-".join)
def test_vmap_with_frozen_statistics_over_every_subset_of_arguments(backend, names):
    op = "batch_norm_inference"
    case = op_case(op)
    stacked = backend.put(
        tuple(np.stack([a, a + 1, 2 * a]) if name in names else a for name, a in zip(ARRAYS, case.arrays, strict=True))
    )
    in_axes = tuple(0 if name in names else None for name in ARRAYS)
    alone = _jitted(op, backend.implementation)
    found = jax.jit(jax.vmap(alone, in_axes=in_axes))(*stacked)
    each = [alone(*(a[i] if axis == 0 else a for a, axis in zip(stacked, in_axes, strict=True))) for i in range(3)]
    _close(found, jax.tree.map(lambda *leaves: np.stack(leaves), *each))


@pytest.mark.parametrize("op", ["conv_transpose", "batch_norm_inference", "group_norm"])
def test_donated_arguments(backend, op):
    """All arguments are donated; XLA may write their gradients in their place."""
    case = op_case(op)
    gradients = partial(values_and_gradients, case.call(backend.implementation))
    donated = backend.put(tuple(map(np.array, case.arrays)))
    found = jax.jit(gradients, donate_argnums=tuple(range(len(donated))))(*donated)
    assert donated[0].is_deleted()
    _close(found, jax.jit(gradients)(*backend.put(case.arrays)))


@pytest.mark.parametrize("op", ["conv_transpose", *BATCH_NORMS, *NORMS])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_eval_shape(op, dtype):
    case = op_case(op)
    shapes = [jax.ShapeDtypeStruct(a.shape, input_dtype(dtype)) for a in case.arrays]
    found = jax.eval_shape(partial(values_and_gradients, case.call(None)), *shapes)
    expected = jax.eval_shape(partial(values_and_gradients, case.plain), *shapes)
    if op == "batch_norm_training" and dtype == "bfloat16":  # the statistics are float32
        found, expected = ((outputs[0], gradients) for (_, outputs), gradients in (found, expected))
    assert jax.tree.map(_described, found) == jax.tree.map(_described, expected)


def _described(array: jax.ShapeDtypeStruct) -> tuple[Any, ...]:
    return array.shape, array.dtype, array.weak_type


def test_debug_nans(backend):
    """No intermediate NaN in a transposed convolution. The folders of the other ops test them."""
    case = op_case("conv_transpose")
    with jax.debug_nans(True):
        found = jax.jit(partial(values_and_gradients, case.call(backend.implementation)))(*backend.put(case.arrays))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))


@pytest.mark.parametrize("op", OPS[:-2])
def test_enable_x64_both_ways(op):
    """One jitted function of float64 NumPy arrays, called with 64-bit types off, on, and off again."""
    case = op_case(op)
    arrays = _wide(case.arrays)
    run = jax.jit(partial(values_and_gradients, case.call(None)))
    expected = _expected("value_and_grad", op)
    for enabled in (False, True, False):
        with jax.enable_x64(enabled):
            _close(run(*arrays), expected, "float64" if enabled else "float32")


@pytest.mark.parametrize("op", OPS)
def test_lowering_for_cuda_without_a_gpu(op):
    """The program for a GPU calls no CPU handler, and no handler at all in a build without the CUDA module."""
    case = op_case(op)
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in case.arrays]
    traced = jax.jit(partial(values_and_gradients, case.call(None))).trace(*shapes)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert set(re.findall(r"custom_call @(jaxgrad_\w+)", text)) <= set(cuda.targets())
    assert "func.func public @main" in text


def _test_file(module: str) -> Path:
    """The file of a module as the table has it: `conv/vmap` is tests/conv/test_vmap.py."""
    folder, name = module.split("/")
    return Path(__file__).parents[1] / folder / f"test_{name}.py"


@pytest.mark.skipif(not _TABLE.exists(), reason="the tests are away from the documentation")
def test_the_table_names_tests_that_exist():
    first_section = _TABLE.read_text().partition("\n## ")[0]
    lines = [line for line in first_section.splitlines() if line.startswith("| ")]
    header, _, *rows = ([cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines)
    assert header[1:] == [*OPS[:-3], "`, `".join(NORMS), "accelerate"]
    assert all(len(row) == len(header) for row in rows)
    cells = {tuple(cell.split("::")) for row in rows for cell in row if "::" in cell}
    assert len(cells) > 30
    for module, name in sorted(cells):
        text = _test_file(module).read_text()
        assert f"def test_{name}(" in text, f"{module}::{name}"
