"""GRU and batch normalization in `jaxgrad.tune`: the texts of the calls, and the functions that are measured."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import Backend
from gru_cases import Case, make_inputs
from jax import lax
from recorded_calls import random_array, recorded_calls
from thorough import one_in
from tolerances import assert_close

import jaxgrad
from jaxgrad._src.choice.environment import current_environment
from jaxgrad._src.core.precision import precision_flags
from jaxgrad._src.gru import measurable as gru_measurable
from jaxgrad._src.norm import measurable as batch_norm_measurable
from jaxgrad._src.norm.params import NormProblem
from jaxgrad._src.tuning import timing

pytestmark = pytest.mark.jax_version


def _call_of(function, *args):
    """The only call of a function, as the backends are asked about it."""
    (recorded,) = recorded_calls(function, *args).values()
    return recorded.call


def _vjp(function, *args):
    """The results, and the gradients of *args with cotangents of ones."""
    y, pullback = jax.vjp(function, *args)
    return y, pullback(jax.tree.map(jnp.ones_like, y))


_GRU = Case(T=40, B=30, direction="bidirectional")
_OPTIONAL = [(), ("sequence_lens",), ("reset",), ("reset", "reset_h"), ("sequence_lens", "reset")]


def _names(given):
    """The floating-point operands, which have gradients, and the others."""
    floating = ["x", "w", "r", "b", "initial_h", *(name for name in given if name == "reset_h")]
    return floating, [name for name in given if name not in floating]


def _gru(*arrays, given):
    floating, others = _names(given)
    settings = {**_GRU.settings, **dict(zip(others, arrays[len(floating) :], strict=True))}

    def call(*arrays):
        return jaxgrad.gru(**dict(zip(floating, arrays, strict=True)), **settings)

    return _vjp(call, *arrays[: len(floating)])


def _gru_arrays(given=()):
    inputs = make_inputs(_GRU, "float32")[0]._asdict()
    return [jnp.asarray(inputs[name]) for names in _names(given) for name in names]


def test_lengths_and_resets_have_rows_of_their_own():
    """The row of a call without them has no word for them."""
    calls = {}
    for given in _OPTIONAL:
        calls |= dict.fromkeys(recorded_calls(partial(_gru, given=given), *_gru_arrays(given)), given)
    expected = {" ".join(["gru f32 T=40 B=30 I=4 H=6 D=2", *given]): given for given in _OPTIONAL}
    assert {text.replace(" without TF32", ""): given for text, given in calls.items()} == expected


@pytest.mark.newest
@pytest.mark.parametrize(
    ("given", "groups"), one_in(2, [(_OPTIONAL[-1], 2), *((given, 1) for given in _OPTIONAL)], several=True)
)
def test_lengths_and_resets_are_measured(given, groups):
    function, arrays = partial(_gru, given=given), _gru_arrays(given)
    if groups > 1:
        function, arrays = jax.vmap(function), [jnp.stack([array] * groups) for array in arrays]
    measurable = gru_measurable.measurable(_call_of(function, *arrays), current_environment().platform)
    (operands,) = timing.random_operands(measurable.operands, [0.1] * len(arrays), one_call_a_program=True)
    floating, others = _names(given)
    optional = dict(zip([*floating, *others], operands, strict=True))
    if "sequence_lens" in given:
        lengths = set(np.ravel(optional["sequence_lens"]))
        assert len(lengths) > 5
        assert lengths <= set(range(20, 41))
    if "reset" in given:
        assert 0 < np.mean(optional["reset"]) < 0.03
    expected = jax.jit(function)(*operands)
    for name, measured in measurable.functions.items():
        found = jax.jit(measured)(*operands)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            backend = Backend(name, jax.default_backend())
            assert_close(one, other, dtype="float32", terms=_GRU.T * _GRU.B, name=name, backend=backend)


def test_a_gru_with_lengths_and_resets_is_tuned():
    """The CPU kernels reject lengths outside [0, T]."""
    given = _OPTIONAL[-1]
    tuning = jaxgrad.tune(partial(_gru, given=given), *_gru_arrays(given), progress=False)
    (choice,) = tuning.choices.values()
    assert set(choice.times_us) == {"cpu" if jax.default_backend() == "cpu" else "cuda", "xla"}


@pytest.mark.parametrize("precision", ["default", "highest"])
def test_a_gru_is_measured_with_the_precision_of_the_call(precision):
    arrays = _gru_arrays()
    with jax.default_matmul_precision(precision):
        call = _call_of(partial(_gru, given=()), *arrays)
    with jax.default_matmul_precision("default"):
        measurable = gru_measurable.measurable(call, current_environment().platform)
        program = jax.jit(measurable.functions["xla"]).lower(*arrays).as_text()
    assert ("HIGHEST" in program) == (precision == "highest")


# The last words of the texts of a GRU, by its precision.
_PRECISION_WORDS = {
    "default": "",
    "bfloat16": "",
    "high": "precision=high",
    "tensorfloat32": "precision=high",
    "highest": "without TF32",
    "float32": "without TF32",
    "F32_F32_F32": "without TF32",
    "BF16_BF16_F32_X3": "precision=BF16_BF16_F32_X3",
    "TF32_TF32_F32": "precision=TF32_TF32_F32",
}


def test_precisions_have_rows_of_their_own():
    """The row of a call with the default precision has no word for it."""
    found = {}
    for precision in _PRECISION_WORDS:
        with jax.default_matmul_precision(precision):
            (found[precision],) = recorded_calls(partial(_gru, given=()), *_gru_arrays())
    start = "gru f32 T=40 B=30 I=4 H=6 D=2"
    assert found == {name: f"{start} {words}".rstrip() for name, words in _PRECISION_WORDS.items()}


@pytest.mark.parametrize(
    ("dtype", "precision", "words"),
    [
        ("float32", None, []),
        ("float32", lax.Precision.DEFAULT, []),
        ("float32", lax.Precision.HIGH, ["precision=high"]),
        ("float32", ("high", lax.Precision.HIGH), ["precision=high"]),
        ("float32", ("high", "default"), ["precision=high,default"]),
        ("float32", ("default", "high"), ["precision=default,high"]),
        ("float32", ("high", "highest"), ["without TF32"]),
        ("bfloat16", "high", []),
        ("bfloat16", "highest", []),
        ("bfloat16", "BF16_BF16_F32_X3", ["precision=BF16_BF16_F32_X3"]),
    ],
)
def test_the_words_of_a_precision(dtype, precision, words):
    with jax.default_matmul_precision("default"):
        assert precision_flags(jnp.dtype(dtype), precision) == words


@pytest.mark.parametrize(
    ("shape", "dtype", "names"),
    [
        ((30, 16, 1), "float32", ["xla"]),
        ((30, 16, 1), "bfloat16", ["cudnn", "xla"]),
        ((30, 16, 9), "float32", ["cudnn", "xla"]),  # the features are not last: another kernel
    ],
)
def test_a_tuning_keeps_the_digits_of_batch_normalization(monkeypatch, shape, dtype, names):
    """With float32 x, the mean of cuDNN's fast kernels has half the digits of XLA's."""
    monkeypatch.setattr(batch_norm_measurable, "measurable_implementations", lambda *_: ["cudnn", "xla"])
    call = NormProblem(1, 1, *shape, None, jnp.dtype(dtype))
    assert list(batch_norm_measurable.measurable(call, "cuda").functions) == names


_BATCH_NORM = [(activation, residual) for activation in (None, "relu") for residual in (False, True)]


def _batch_norm(x, scale, bias, *residual, activation):
    def y(x, scale, bias, residual=None):
        return jaxgrad.batch_norm_training(x, scale, bias, residual=residual, activation=activation)[0]

    return _vjp(y, x, scale, bias, *residual)


def _batch_norm_arrays(residual):
    x = random_array(30, 16)
    return [x, random_array(16), random_array(16), *([random_array(30, 16)] if residual else [])]


def test_residuals_have_rows_of_their_own():
    calls = {}
    for activation, residual in _BATCH_NORM:
        (text,) = recorded_calls(partial(_batch_norm, activation=activation), *_batch_norm_arrays(residual))
        calls[text.removeprefix("batch_norm_training x=f32[30,16,1]")] = activation, residual
    names = ["", " residual", " relu", " relu residual"]
    assert calls == dict(zip(names, _BATCH_NORM, strict=True))


@pytest.mark.newest
@pytest.mark.parametrize(("activation", "residual"), _BATCH_NORM)
def test_residuals_are_measured(activation, residual):
    function = partial(_batch_norm, activation=activation)
    call = _call_of(function, *_batch_norm_arrays(residual))
    measurable = batch_norm_measurable.measurable(call, current_environment().platform)
    (operands,) = timing.random_operands(measurable.operands, one_call_a_program=True)
    *arrays, dy = operands
    assert len(arrays) == 3 + residual
    expected = function(*arrays)
    for name, measured in measurable.functions.items():
        found = jax.jit(measured)(*arrays, jnp.ones_like(dy))
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert_close(one, other, dtype="float32", terms=1000, name=name)
