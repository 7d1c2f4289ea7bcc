"""`jaxgrad.tune`: which calls it measures, and what it chooses."""

from __future__ import annotations

import dataclasses
import datetime
import io
import sys
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accelerated import convolve, convolve_arrays
from gru_cases import Case, make_inputs
from jax import lax
from recorded_calls import random_array

import jaxgrad
from jaxgrad._src.choice.environment import current_environment
from jaxgrad._src.choice.measured_choices import Measurable, Recorder
from jaxgrad._src.conv import measurable as conv_measurable
from jaxgrad._src.conv.kernels import cudnn, onednn
from jaxgrad._src.core.jax_internals import lower_all
from jaxgrad._src.native import cuda
from jaxgrad._src.tuning import api, choices, timing
from jaxgrad._src.tuning.progress import with_progress

pytestmark = pytest.mark.jax_version

_GROUPS = 8
OWN = "onednn" if jax.default_backend() == "cpu" else "cudnn"


def _conv(x, w, **settings):
    return jaxgrad.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=_GROUPS, **settings
    )


def _loss(w, x, **settings):
    return jnp.sum(jnp.sin(_conv(x, w, **settings)))


_ARRAYS = random_array(3, 3, 2, 2 * _GROUPS), random_array(2, 24, 17, 2 * _GROUPS)


def _tune(function, /, *args, **kwargs):
    return jaxgrad.tune(function, *args, progress=False, **kwargs)


def _passes(tuning):
    """The first words of the calls that were measured."""
    return [call.split(" x=")[0] for call in tuning.choices]


def test_the_passes_of_an_op():
    tuning = _tune(jax.grad(_loss), *_ARRAYS)
    assert _passes(tuning) == ["conv forward", "conv weight_gradient"]
    tuning = _tune(jax.jit(jax.grad(_loss, (0, 1))), *_ARRAYS)
    assert sorted(_passes(tuning)) == ["conv forward", "conv input_gradient", "conv weight_gradient"]
    for choice in tuning.choices.values():
        assert set(choice.times_us) == {OWN, "xla"}
        assert min(choice.times_us.values()) > 0
        assert choice.times_us[choice.implementation] <= choice.times_us[choice.default]
        assert datetime.date.fromisoformat(choice.date)


def test_the_passes_of_a_depthwise_convolution():
    """XLA, jaxgrad's kernel and the library's, which may lack a pass on a GPU."""

    def loss(w, x):
        op = jaxgrad.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=32
        )
        return jnp.sum(jnp.sin(op))

    tuning = _tune(jax.grad(loss, (0, 1)), random_array(5, 5, 1, 32), random_array(2, 24, 17, 32))
    assert sorted(_passes(tuning)) == ["conv forward", "conv input_gradient", "conv weight_gradient"]
    on_a_gpu = {"xla", "cuda"}, {"xla", "cuda", "cudnn"}
    possible = ({"xla", "cpu", "onednn"},) if OWN == "onednn" else on_a_gpu
    for choice in tuning.choices.values():
        assert set(choice.times_us) in possible
        assert min(choice.times_us.values()) > 0


def test_calls_that_are_alike_are_measured_once():
    def twice(w, x):
        return _conv(_conv(x, w), w)

    assert _passes(_tune(twice, *_ARRAYS)) == ["conv forward"]


def test_traced_arguments_are_refused():
    with pytest.raises(TypeError, match=r"jaxgrad.tune: arrays have no values here: .* outside of functions that JAX"):
        jax.jit(lambda w, x: _tune(_conv, w, x).choices)(*_ARRAYS)
    with pytest.raises(TypeError, match="arrays have no values here"):
        jax.jit(lambda: _tune(_conv, *_ARRAYS).choices)()


async def _coroutine(w, x):
    return _conv(w, x)


def _generator(w, x):
    yield _conv(w, x)


@pytest.mark.parametrize(
    ("function", "kind"), [(_coroutine, "a coroutine"), (_generator, "a generator"), (SimpleNamespace, "a class")]
)
def test_functions_that_compute_nothing_are_refused(function, kind):
    with pytest.raises(TypeError, match=rf"jaxgrad.tune: function must not be {kind}.*, got \w+$"):
        _tune(function, *_ARRAYS)


def test_calls_under_an_override_of_the_function_are_recorded():
    """Also those under a tuning, which may hold choices for other calls."""
    expected = _tune(_loss, *_ARRAYS)
    calls = list(expected.choices)
    assert calls
    for decorator in (jaxgrad.config.override(search="heuristic"), jaxgrad.config.override(tuning=expected)):
        assert len(_tune(decorator(_loss), *_ARRAYS).choices) == len(calls)

    def under_a_tuning(w, x):
        with expected:
            return _loss(w, x)

    assert list(_tune(under_a_tuning, *_ARRAYS).choices) == calls
    with pytest.warns(UserWarning, match="no call to measure"):
        assert not _tune(jaxgrad.config.override(tuning=None)(_loss), *_ARRAYS).choices


def test_calls_that_are_forced_or_not_accelerated_are_left_alone():
    for function, arrays in ((_forced, _ARRAYS), (convolve, convolve_arrays())):
        with pytest.warns(UserWarning, match=r"jaxgrad.tune: the function has no call to measure") as warnings:
            assert not _tune(function, *arrays).choices
        assert {warning.filename for warning in warnings} == {__file__}


def _forced(w, x):
    return _conv(x, w, implementation="xla")


def test_shapes_in_place_of_arrays():
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in _ARRAYS]
    assert _passes(_tune(_loss, *shapes)) == ["conv forward"]


def test_batch_norm_and_gru():
    """Value and gradients are measured together, and small calls that run on XLA too."""

    def network(x, sequences):
        ones, zeros = jnp.ones(16, jnp.float32), jnp.zeros(16, jnp.float32)
        y, _, _ = jaxgrad.batch_norm_training(x, ones, zeros, feature_axis=1, activation="relu")
        frozen = jaxgrad.batch_norm_inference(x, ones, zeros, zeros, ones, feature_axis=1)
        (_, h) = jaxgrad.gru(*sequences)
        return y.sum() + frozen.sum() + h.sum()

    sequences = make_inputs(Case(T=3, B=2, I=4, H=5), "float32")[0]
    tuning = _tune(jax.grad(network, (0, 1)), random_array(6, 16, 5), tuple(map(jnp.asarray, sequences[:3])))
    assert {call.split()[0] for call in tuning.choices} == {"batch_norm_training", "batch_norm_inference", "gru"}


def test_accelerated_convolutions():
    """Each reading of an equation is measured, and XLA's own convolution."""
    tuning = _tune(jaxgrad.accelerate(jax.jit(convolve)), *convolve_arrays())
    ((call, choice),) = tuning.choices.items()
    assert call.startswith("jax.lax f32[2,3,9,7] NCHW f32[4,3,3,3] OIHW f32[2,4,9,7] NCHW padding=((1,1),(1,1))")
    assert set(choice.times_us) == {"xla", f"forward on {OWN}", f"input_gradient on {OWN}"}


def test_the_sizes_that_vmap_makes():
    """Examples with the same weights become a batch; weights of their own become independent problems."""
    w, x = _ARRAYS

    def mapped(w, x):
        return jax.vmap(_conv, (0, None))(x, w)

    (text,) = _tune(mapped, w, jnp.stack([x, x, x])).choices
    assert "x=f32[6,24,17,16]" in text
    tuning = _tune(lambda w, x: jax.vmap(_conv)(x, w), jnp.stack([w] * 3), jnp.stack([x] * 3))
    (text,) = tuning.choices
    assert "x=f32[2,24,17,16]" in text
    assert "problems=3" in text


@pytest.mark.skipif(not cuda.targets(), reason="the package is built without CUDA")
def test_independent_problems_are_measured_on_what_the_table_prefers_not():
    x, w = (np.stack([array] * 9) for array in convolve_arrays())
    recorder = Recorder()
    with jaxgrad.config.override(tuning=recorder):
        op = partial(jaxgrad.conv_general_dilated, window_strides=(1, 1), padding="SAME")
        function = jax.vmap(jax.grad(lambda w, x: jnp.sum(jnp.sin(op(x, w)))))
        jax.jit(function).trace(w, x).lower(lowering_platforms=("cuda",))
    (recorded,) = (each for each in recorder.calls.values() if each.pass_name == "weight_gradient")
    assert "cudnn" not in recorded.implementations
    measurable = conv_measurable.measurable_pass(recorded.pass_name, recorded.call, "cuda")
    lowered = jax.jit(measurable.functions["cudnn"]).trace(*measurable.operands).lower(lowering_platforms=("cuda",))
    assert "jaxgrad_cudnn_conv_weight_gradient" in lowered.as_text()


@pytest.mark.parametrize("accelerated", [False, True])
def test_a_wrong_preference_is_found_out(monkeypatch, accelerated):
    """XLA takes ten times as long and more for gradients of groups."""
    if OWN != "onednn":
        pytest.skip("XLA's kernels for groups are fast on a GPU")
    plain = _tune(jax.grad(_loss, (0, 1)), *_ARRAYS)
    assert {choice.implementation for choice in plain.choices.values()} == {"onednn"}
    monkeypatch.setattr(onednn.OneDnnBackend, "why_slower", lambda *_, **__: "a wrong preference")
    function = jax.grad(_loss, (0, 1))
    if accelerated:

        @jaxgrad.accelerate
        def convolution(w, x):
            return jnp.sum(jnp.sin(lax.conv(x, w, (1, 1), "SAME")))

        function = jax.grad(convolution, (0, 1))
        w, x = random_array(4, 4, 5, 5), random_array(2, 4, 30, 31)
    else:
        w, x = _ARRAYS
    tuning = _tune(function, w, x)
    assert {choice.default for choice in tuning.choices.values()} <= {"xla", "weight_gradient on xla"}
    gains = [choice.gain for choice in tuning.choices.values()]
    assert min(gains) >= 1
    assert max(gains) > (1.2 if accelerated else 5)


def test_progress_and_what_a_tuning_saves(capsys, monkeypatch):
    monkeypatch.setattr(onednn.OneDnnBackend, "why_slower", lambda *_, **__: "a wrong preference")
    monkeypatch.setattr(cudnn.CudnnBackend, "why_slower", lambda *_, **__: "")
    jaxgrad.tune(jax.grad(_loss), *_ARRAYS)
    first, second, last = capsys.readouterr().err.splitlines()
    assert first.startswith("jaxgrad.tune 1/2 conv forward x=")
    assert second.startswith("jaxgrad.tune 2/2 conv weight_gradient x=")
    assert last.startswith("jaxgrad.tune: another implementation is faster for ")
    assert (" ms without the tuning" in last) == ("for 0 of 2" not in last)


@pytest.mark.parametrize("name", ["xla", f"input_gradient on {OWN}"])
def test_an_implementation_that_does_not_compile_is_left_out(monkeypatch, name):
    def fails(function, sets):
        if function is alternatives[name]:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")
        return timing.lower_with_sets(function, sets)

    def recorded(equation, platform):
        alternatives.update(equation.alternatives(platform))
        return Measurable(alternatives, [equation.lhs, equation.rhs])

    alternatives = {}
    monkeypatch.setattr(choices, "lower_with_sets", fails)
    monkeypatch.setattr(conv_measurable, "measurable_equation", recorded)
    (choice,) = _tune(jaxgrad.accelerate(convolve), *convolve_arrays()).choices.values()
    assert set(choice.times_us) == set(alternatives) - {name}


@pytest.mark.parametrize(("gain", "chosen"), [(1.04, "xla"), (1.06, "kernel")])
def test_an_alternative_that_is_hardly_faster_does_not_replace_the_default(monkeypatch, gain, chosen):
    monkeypatch.setattr(choices, "medians", lambda programs: {"xla": gain, "kernel": 1.0})
    measurable = Measurable({"xla": jnp.sin, "kernel": jnp.cos}, [jax.ShapeDtypeStruct((3,), "float32")])
    assert choices.fastest(measurable, "xla").implementation == chosen


@pytest.mark.parametrize("error", [MemoryError, jax.errors.JaxRuntimeError])
def test_a_call_whose_operands_do_not_fit_is_left_out(monkeypatch, error):
    """Drawing the operands fails for the host's memory, transferring them for the device's."""

    def random_operands(operands, **kwargs):
        if operands[0].size > 10_000:
            raise error
        return timing.random_operands(operands, **kwargs)

    monkeypatch.setattr(choices, "random_operands", random_operands)
    w, x = _ARRAYS
    tuning = _tune(lambda w, *xs: [_conv(x, w) for x in xs], w, x[:, :9], x)
    (text,) = tuning.choices
    assert "x=f32[2,9,17,16]" in text


@pytest.mark.parametrize("read", [float, np.asarray, [1].__getitem__], ids=["float", "numpy", "index"])
def test_a_function_that_needs_values(read):
    errors = jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError
    with pytest.raises((*errors, jax.errors.TracerIntegerConversionError)) as caught:
        _tune(lambda x, w: read(_conv(x, w).sum().astype(int)), *reversed(_ARRAYS))
    note = "jaxgrad.tune traces the function, as jax.jit does: pass the training step, not its loop."
    assert note in caught.value.__notes__


def test_the_progress_bar(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("COLUMNS", "60")
    assert list(with_progress("tune", [("a", 1), ("b", 2), ("c" * 99, 3)])) == [("a", 1), ("b", 2), ("c" * 99, 3)]
    bars = ["." * 20, "#" * 6 + "." * 14, "#" * 13 + "." * 7]
    lines = [f"tune [{bar}] {text}"[:59] for bar, text in zip(bars, ("1/3 a", "2/3 b", "3/3 " + "c" * 99), strict=True)]
    assert sys.stderr.getvalue() == "".join(f"\r{line}\x1b[K" for line in [*lines, ""])


def test_wrong_arguments():
    with pytest.raises(TypeError, match=r"jaxgrad.tune: function must be callable, got int"):
        jaxgrad.tune(3)
    with pytest.raises(TypeError, match=r"jaxgrad.tune: progress must be a bool, got str"):
        jaxgrad.tune(abs, 3, progress="no")


def test_the_environment_names_this_machine():
    machine = current_environment()
    assert machine.jax == jax.__version__
    assert machine.platform == ("cpu" if OWN == "onednn" else "cuda")
    assert machine.library.split()[1]
    assert bool(machine.driver) == (OWN != "onednn")


def test_a_step_that_changes_its_arguments_in_place():
    """Its gradients are not among its results."""

    class Model:
        def __init__(self, w):
            self.w = w

    jax.tree_util.register_pytree_node(Model, lambda m: ((m.w,), None), lambda _, leaves: Model(*leaves))

    def step(model, x):
        loss, model.w = jax.value_and_grad(_loss)(model.w, x)
        return loss

    assert _passes(_tune(step, Model(_ARRAYS[0]), _ARRAYS[1])) == ["conv forward", "conv weight_gradient"]


def test_arguments_that_are_no_arrays():
    w, x = _ARRAYS

    def function(w, x, function, dtype, number):
        assert (function, dtype, number) == (sum, np.float32, np.int64(2))
        return number * _conv(x.astype(dtype), w)

    assert _passes(_tune(function, w, x, function=sum, dtype=np.float32, number=np.int64(2))) == ["conv forward"]
    with jax.disable_jit():
        assert _passes(_tune(_loss, w, x)) == ["conv forward"]


def test_a_function_that_cannot_be_timed(capsys, monkeypatch):
    """The measurements are returned all the same."""
    monkeypatch.setattr(onednn.OneDnnBackend, "why_slower", lambda *_, **__: "a wrong preference")

    def fails(program):
        if program.run.__qualname__.startswith("with_arrays"):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory")
        return timing.run_once(program)

    monkeypatch.setattr(api, "run_once", fails)
    tuning = jaxgrad.tune(jax.grad(_loss), *_ARRAYS)
    assert len(tuning.choices) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    changed = any(choice.implementation != choice.default for choice in tuning.choices.values())
    assert last.endswith("could not be timed: RESOURCE_EXHAUSTED: no memory") == changed


@pytest.mark.parametrize(("steps", "expected"), [(63, 8), (64, 1)])
def test_calls_in_a_program_on_a_gpu(monkeypatch, steps, expected):
    """One of a long GRU: XLA would compile the loops of each call."""
    calls = []

    def count(function, sets):
        calls.append(len(sets))
        raise jax.errors.JaxRuntimeError("not measured here")

    monkeypatch.setattr(timing.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(choices, "lower_with_sets", count)
    x, w, r = (jnp.ones(shape, "float32") for shape in ((steps, 2, 3), (1, 12, 3), (1, 12, 4)))
    jaxgrad.tune(jaxgrad.gru, x, w, r, progress=False)
    assert set(calls) == {expected}


def _two_programs():
    sets = [[jnp.full((4, 3), value)] for value in (1.0, 2.0)]
    functions = {"sum": jnp.sum, "exp": lambda x: {"of x": jnp.exp(x)}}
    return {name: timing.with_sets(function, sets) for name, function in functions.items()}


def test_short_calls_are_repeated_on_a_gpu(monkeypatch):
    programs = _two_programs()
    assert timing.repeated_on_gpu(programs) == programs or OWN != "onednn"
    monkeypatch.setattr(timing.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(timing, "_seconds_of_a_run", lambda _: 3e-3)
    found = timing.repeated_on_gpu(programs)
    assert [program.calls for program in found.values()] == [2 * 4, 2 * 4]
    jax.tree.map(np.testing.assert_array_equal, *({n: p.run() for n, p in each.items()} for each in (found, programs)))
    monkeypatch.setattr(timing, "_seconds_of_a_run", lambda _: 11e-3)
    assert timing.repeated_on_gpu(programs) == programs


@pytest.mark.parametrize(("steps", "expected"), [(63, 1), (64, 0)])
def test_short_calls_are_measured_as_repeated(monkeypatch, steps, expected):
    """Not a long GRU, whose loops XLA would compile once more."""
    found = []
    monkeypatch.setattr(choices, "repeated_on_gpu", lambda programs: found.append(programs) or programs)
    x, w, r = (jnp.ones(shape, "float32") for shape in ((steps, 2, 3), (1, 12, 3), (1, 12, 4)))
    jaxgrad.tune(jaxgrad.gru, x, w, r, progress=False)
    assert len(found) == expected


@pytest.mark.parametrize("where", ["lowered", "compiled"])
def test_no_program_repeats_calls_if_one_of_them_lacks_memory(monkeypatch, where):
    def fails(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

    programs = _two_programs()
    lower = fails if where == "lowered" else lambda _: fails
    programs["exp"] = dataclasses.replace(programs["exp"], lower_repeated=lower)
    monkeypatch.setattr(timing.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(timing, "_seconds_of_a_run", lambda _: 1e-3)
    assert timing.repeated_on_gpu(programs) == programs


@pytest.mark.parametrize("dtype", ["float32", "bool", "key"])
def test_every_repeated_call_transposes_its_operand(monkeypatch, dtype):
    """As in a program that makes it once. LAPACK takes and returns arrays in another layout; others have no number."""
    texts = []
    compile_ = jax.stages.Lowered.compile

    def compiled(lowered):
        program = compile_(lowered)
        texts.append(program.as_text())
        return program

    def factors(x, other):
        return jnp.linalg.qr(x), other

    monkeypatch.setattr(jax.stages.Lowered, "compile", compiled)
    other = {"float32": jnp.ones(3), "bool": jnp.array([True]), "key": jax.random.key(0)}[dtype]
    timing.lower_with_sets(factors, [[jnp.ones((16, 8), "float32"), other]], 5)().run()
    loop, program = texts[-1].split("\nENTRY")
    assert "{0,1}" in loop or OWN != "onednn"  # the layout of LAPACK
    assert "{0,1}" not in program


@pytest.mark.gpu
def test_repeated_calls_stay_in_the_loop():
    """XLA would move equal calls out of it."""
    sets = [[jnp.ones((4096, 4096)), jnp.ones((4096, 4096))]]
    few, many = (timing.run_once(timing.lower_with_sets(jnp.dot, sets, repeats)()) for repeats in (2, 40))
    assert min(many.seconds(1) for _ in range(3)) > 10 * min(few.seconds(1) for _ in range(3))


@pytest.mark.parametrize("failures", [1, 2])
def test_what_fails_on_a_thread_is_compiled_again_alone(monkeypatch, failures):
    def lower(function, sets):
        compiled = timing.lower_with_sets(function, sets)

        def fails_first():
            attempts.append(function)
            if function is alternatives["xla"] and attempts.count(function) <= failures:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")
            return compiled()

        return fails_first

    def recorded(equation, platform):
        alternatives.update(equation.alternatives(platform))
        return Measurable(alternatives, [equation.lhs, equation.rhs])

    alternatives, attempts = {}, []
    monkeypatch.setattr(choices, "lower_with_sets", lower)
    monkeypatch.setattr(conv_measurable, "measurable_equation", recorded)
    (choice,) = _tune(jaxgrad.accelerate(convolve), *convolve_arrays()).choices.values()
    assert set(choice.times_us) == set(alternatives) - ({"xla"} if failures == 2 else set())


def test_the_function_itself_is_not_compiled(monkeypatch):
    """On one device lowering finds all calls, and XLA compiles a training step for minutes."""
    compiled = []
    compile_ = jax.stages.Lowered.compile
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *args: compiled.append(args) or compile_(*args))
    (choice,) = _tune(_loss, *_ARRAYS).choices.values()
    programs = 1 if OWN == "onednn" else 2  # of each implementation: on a GPU, short calls are repeated in another one
    assert len(compiled) == programs * len(choice.times_us)


def test_a_release_of_jax_whose_modules_do_not_say_the_number_of_partitions(monkeypatch):
    """The function is compiled."""
    compiled = []
    monkeypatch.setattr(jax.stages.Lowered, "compiler_ir", lambda *_: None)
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda lowered: compiled.append(lowered))
    lower_all(_loss, *_ARRAYS)
    assert len(compiled) == 1
