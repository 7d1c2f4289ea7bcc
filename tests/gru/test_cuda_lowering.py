"""Selection and calls of the CUDA kernels of the GRU, with the fake driver and NVRTC of fake_cuda.c.

No GPU is needed.
"""

from __future__ import annotations

import pytest
from cuda_module import NEEDS_CUDA_MODULE

pytestmark = NEEDS_CUDA_MODULE

_IMPORTS = """
import re
import jax, jax.numpy as jnp, numpy as np
import jaxgrad
from gru_lowering import arrays, before_loads, calls, cuda, explained, fake, lowered, outcome, report, text_for_gpu
"""


@pytest.fixture
def run(on_fake_cuda):
    """Runs a script in a process of its own and returns the values that it passes to `report`."""
    return lambda script, **environment: on_fake_cuda(_IMPORTS + script, **environment)


def test_program_and_explanation(run):
    """One call for each pass. Lowering compiles each kernel once for all programs."""
    found = run("""
texts = [lowered() for _ in range(2)]
jax.clear_caches()
texts.append(lowered())
compilations = fake.fake_compilations()
forced, xla = (calls(lowered(implementation=name)) for name in ("cuda", "xla"))
report(texts=texts, calls=calls(texts[0]), compilations=compilations, forced=forced, xla=xla, why=str(explained()),
       forced_why=str(explained(implementation="cuda")), typical=str(jaxgrad.explain(jaxgrad.gru, platform="gpu")))
""")
    assert len(set(found["texts"])) == 1
    assert found["calls"] == found["forced"]
    assert [name for name, *_ in found["calls"]] == ["forward", "backward"]
    assert "stablehlo.while" not in found["texts"][0]
    assert found["compilations"] == 3  # with the empty program that tests NVRTC
    assert found["why"].startswith("gru on gpu: 'cuda' (jaxgrad's own kernel; row 'other'")
    assert "of the table 'gpu'" in found["why"]
    assert found["forced_why"] == "gru on gpu: 'cuda' (forced by implementation='cuda')"
    assert found["typical"] == "gru on gpu: 'cuda' (jaxgrad's own kernel)"
    assert found["xla"] == []


def test_operands_and_results(run):
    found = run("""
settings = {"linear_before_reset": True, "clip": 0.5, "direction": "bidirectional"}
report(plain=calls(lowered()), linear=calls(lowered(settings=settings, D=2, B=100, dtype="bfloat16")))
""")
    (_, attributes, forward), (_, _, backward) = found["plain"]
    operands, results = forward.split(" -> ")
    assert "tensor<1x10x4x1x3x43xf32>, tensor<1x1x129x43xf32>, tensor<1x1x258xf32>" in operands
    assert "tensor<1x10x1x4x43xf32>, tensor<1x1x4x43xf32>, tensor<1x10x1x4x129xf32>" in results
    assert "tensor<1x10x4x1x3x43xf32>, tensor<0xf32>" in backward.split(" -> ")[1]
    assert "linear_before_reset = false" in attributes
    assert "reversed = 0" in attributes
    (_, attributes, forward), (_, _, backward) = found["linear"]
    operands, results = forward.split(" -> ")
    assert "tensor<1x10x100x2x3x43xf32>, tensor<1x2x129x43xbf16>, tensor<1x2x258xbf16>" in operands
    assert "tensor<1x10x2x100x172xbf16>" in results
    of_gates = "tensor<1x10x100x2x3x43xbf16>"
    assert f"{of_gates}, {of_gates}" in backward.split(" -> ")[1]
    assert "reversed = 2" in attributes
    assert "linear_before_reset = true" in attributes


@pytest.mark.parametrize(
    ("call", "hidden", "joins"),
    [
        ('dtype="bfloat16"', 43, True),
        ('dtype="float32"', 43, True),
        ('precision="highest"', 43, False),
        ('settings={"linear_before_reset": True}', 43, False),
        ('dtype="bfloat16"', 256, True),
        ('dtype="bfloat16"', 257, False),
        ('dtype="float32"', 129, False),
    ],
)
def test_joined_products(run, call, hidden, joins):
    """One product computes the gradient of r for few hidden units, on tensor cores."""
    found = run(f"""
text = lowered(H={hidden}, {call})
report(shapes=re.findall(r"dot_general.* -> tensor<1x(\\w+)xf32>", text), calls=calls(text))
""")
    assert len(found["calls"]) == 2
    assert (f"{3 * hidden}x{2 * hidden}" in found["shapes"]) == joins
    assert (f"{2 * hidden}x{hidden}" in found["shapes"]) == (not joins)


@pytest.mark.parametrize(
    ("precision", "allowed"),
    [("default", True), ("tensorfloat32", True), ("high", True), ("highest", False), ("float32", False)],
)
def test_precision(run, precision, allowed):
    """JAX's precision where the op is called holds for its gradients too."""
    found = run(f"""
def loss(x, others):
    with jax.default_matmul_precision({precision!r}):
        y = jaxgrad.gru(x, **others)[0]
    return jnp.sum(y)
others = arrays()
x = others.pop("x")
report(calls=calls(text_for_gpu(jax.grad(loss), x, others)))
""")
    assert [f"allow_tf32 = {str(allowed).lower()}" in attributes for _, attributes, _ in found["calls"]] == [True, True]


def test_precision_of_a_later_context(run):
    """The gradients have the precision of the call, also where it was the default, and the caches know no other."""
    found = run("""
def loss(x, others):
    return jnp.sum(jaxgrad.gru(x, **others)[0] ** 2)

def gradients(x, others):
    y, pullback = jax.vjp(loss, x, others)
    with jax.default_matmul_precision("highest"):
        return pullback(y)

def flags():
    text = text_for_gpu(gradients, x, others)
    return [re.search("allow_tf32 = (\\\\w+)", attributes)[1] for _, attributes, _ in calls(text)]

others = arrays()
x = others.pop("x")
found = [flags()]
jax.config.update("jax_default_matmul_precision", "highest")
found += [flags()]
jax.config.update("jax_default_matmul_precision", None)
report(flags=[*found, flags()])
""")
    assert found["flags"] == [["true"] * 2, ["false"] * 2, ["true"] * 2]


def test_one_step_runs_on_xla(run):
    found = run("""
few = {T: [str(explained(T=T)), len(calls(lowered(T=T)))] for T in (1, 2)}

def steps_one_by_one(x, w, r, h):
    return jax.lax.scan(lambda h, x: jaxgrad.gru(x[None], w, r, initial_h=h)[::-1], h, x)

of = {name: array for name, array in arrays().items() if name != "b"}
scan = text_for_gpu(steps_one_by_one, *of.values())
report(few=few, forced=len(calls(lowered(T=1, implementation="cuda"))), in_scan=len(calls(scan)))
""")
    assert found["in_scan"] == 0
    why, count = found["few"]["1"]
    assert why.startswith("gru on gpu: 'xla' (one step has no loop")
    assert count == 0
    assert found["few"]["2"][1] == found["forced"] == 2


@pytest.mark.parametrize(
    ("call", "environment", "reason"),
    [
        ("dtype='float64'", {}, "jaxgrad's GRU kernels do not compute float64"),
        ("H=2049", {}, "jaxgrad's GRU kernels have at most 2048 hidden units"),
        ("", {"FAKE_MAJOR": "7"}, "jaxgrad's GRU kernels require a GPU of compute capability 8.0 or later"),
        (
            "H=143",
            {"FAKE_SHARED": "10000"},
            "the recurrent weights of 143 hidden units do not fit in the 132 multiprocessors of the GPU, with "
            "10000 bytes of shared memory each",
        ),
    ],
)
def test_unsupported_calls(run, call, environment, reason):
    found = run(
        f"""
report(why=str(explained({call})), calls=calls(lowered({call})), compilations=fake.fake_compilations(),
       forced=outcome(explained, implementation="cuda"{call and ", " + call}))
""",
        JAX_ENABLE_X64="1",
        **environment,
    )
    assert found["why"].startswith(f"gru on gpu: 'xla' ({reason}")
    assert found["forced"] == f"ValueError: jaxgrad.gru: implementation='cuda' cannot run: {reason}"
    assert found["calls"] == []
    assert found["compilations"] == 0


@pytest.mark.parametrize(
    ("multiprocessors", "occupancy", "hidden", "reason"),
    [
        (7, 1, 128, ""),
        (7, 1, 200, "the recurrent weights of 200 hidden units do not fit in the 7 multiprocessors of the GPU"),
        (14, 1, 200, ""),
        (14, 1, 300, "the recurrent weights of 300 hidden units do not fit in the 14 multiprocessors of the GPU"),
        (16, 1, 300, ""),
        (16, 0, 64, "a block of a kernel of jaxgrad's GRU does not fit a multiprocessor of the GPU"),
        (16, 0, 200, "the GPU runs 0 blocks of a kernel of jaxgrad's GRU at once, and 8 exchange the state"),
    ],
)
def test_slices_of_a_gpu(run, multiprocessors, occupancy, hidden, reason):
    """As MIG and MPS make them: blocks that exchange the state run at once, or XLA runs the call."""
    found = run(
        f"""
call = dict(T=100, B=8, H={hidden}, dtype="bfloat16")
report(why=str(explained(**call)), calls=len(calls(lowered(**call))),
       forced=outcome(explained, implementation="cuda", **call))
""",
        FAKE_MULTIPROCESSORS=str(multiprocessors),
        FAKE_OCCUPANCY=str(occupancy),
    )
    if reason:
        assert found["why"].startswith(f"gru on gpu: 'xla' ({reason}")
        assert found["forced"].startswith(f"ValueError: jaxgrad.gru: implementation='cuda' cannot run: {reason}")
    else:
        assert found["why"].startswith("gru on gpu: 'cuda' (jaxgrad's own kernel")
    assert found["calls"] == (0 if reason else 2)


@pytest.mark.parametrize("mapped", ["wr", "xwrb", "x"])
def test_vmap_is_one_call_of_each_kernel(run, mapped):
    """Mapped weights are groups; mapped inputs alone fold into the batch."""
    found = run(f"""
text = lowered(mapped={tuple(mapped)!r})
report(calls=calls(text), loops=text.count("stablehlo.while"))
""")
    (_, _, forward), (_, _, backward) = found["calls"]
    assert found["loops"] == 0
    assert ("tensor<1x10x1x12x43xf32>" if mapped == "x" else "tensor<3x10x1x4x43xf32>") in forward
    assert ("tensor<1x10x12x1x3x43xf32>" if mapped == "x" else "tensor<3x10x4x1x3x43xf32>") in backward.split(" -> ")[1]


def test_rows_that_vmap_makes_may_run_on_xla(run):
    """A table that prefers XLA for many rows holds for rows of the call and for those that are folded into it."""
    found = run("""
import dataclasses
from jaxgrad._src.gru import backend
preference = backend.preference
preferred = lambda features: "xla" if features.rows >= 512 else "cuda"
backend.preference = lambda *args: dataclasses.replace(preference(*args), prefer=preferred(args[3]))
count = lambda **sizes: len(calls(lowered(**sizes)))
report(plain=[count(B=B) for B in (511, 512)], mapped=[count(B=B, mapped=("x", "initial_h")) for B in (170, 171)],
       forced=count(B=171, mapped=("x", "initial_h"), implementation="cuda"))
""")
    assert found["plain"] == found["mapped"] == [2, 0]
    assert found["forced"] == 2


@pytest.mark.parametrize("over", ["examples", "weights"])
def test_kernels_of_sizes_that_vmap_makes_are_loaded_while_lowering(run, over):
    """As those of the call itself: a call that is loaded later may fail where the program runs."""
    found = run(f"""
loaded = []
before_loads(lambda *call: loaded.append(call[:4]))
lowered(mapped={("x", "initial_h") if over == "examples" else ("x", "w", "r", "b", "initial_h")!r})
report(loaded=loaded)
""")
    problems, rows = (1, 12) if over == "examples" else (3, 4)
    for is_backward in (False, True):
        assert [is_backward, problems, rows, 43] in found["loaded"]


def test_a_kernel_with_a_bound_is_loaded_where_there_is_one(run):
    """The kernel that the handler runs. It reads the bound as float32, in which the last one is infinite."""
    found = run("""
loaded = []
before_loads(lambda *call: loaded.append(call[-1]["has_clip"]))
for clip in (None, 0.5, 3e38, 1e39):
    lowered(settings={"clip": clip})
report(loaded=loaded)
""")
    assert found["loaded"] == [False, False, True, True, True, True, False, False]


def test_a_kernel_with_the_arrays_of_a_call_is_loaded(run):
    """The kernel that the handler runs."""
    found = run("""
loaded = []
before_loads(lambda *call: loaded.append([name for name, is_set in call[-1].items() if is_set]))
given = {"sequence_lens": np.ones(4, np.int32), "reset": np.zeros((10, 4), bool), "reset_h": np.zeros((1, 4, 43), "f")}
for names in ((), ("sequence_lens",), ("reset",), ("reset", "reset_h")):
    lowered(settings={name: given[name] for name in names})
report(loaded=loaded[::2], backward=loaded[1::2])
""")
    assert found["loaded"] == found["backward"] == [[], ["has_lengths"], ["has_resets"], ["has_resets", "has_reset_h"]]


def test_a_failing_compiler_of_sizes_that_vmap_makes(run):
    """Such a call runs on XLA, unless there are other processes, whose programs would have the kernel."""
    found = run("""
def fail(is_backward, problems, rows, hidden, features):
    if (problems, rows) == (3, 4):
        raise RuntimeError("out of memory")
before_loads(fail)
mapped = tuple(arrays())
alone = len(calls(lowered(mapped=mapped)))
jax.clear_caches()
jax.process_count = lambda: 2
report(alone=alone, together=outcome(lowered, mapped=mapped))
""")
    assert found["alone"] == 0
    assert found["together"] == "RuntimeError: out of memory"


def test_a_failing_compiler(run):
    """The call runs on XLA, and the explanation has the compiler's message."""
    found = run(
        'report(why=str(explained()), calls=calls(lowered()), forced=outcome(explained, implementation="cuda"))',
        FAKE_NVRTC="6",
    )
    assert found["why"].startswith("gru on gpu: 'xla' (jaxgrad's own CUDA kernels are missing: ")
    assert "NVRTC_ERROR_COMPILATION" in found["why"]
    assert found["forced"].startswith("RuntimeError: jaxgrad.gru: implementation='cuda' cannot run: ")
    assert found["calls"] == []


def test_without_steps_or_rows(run):
    """There is no kernel call, whatever is forced."""
    found = run("""
report(calls=[calls(lowered(implementation=name, **size)) for name in (None, "cuda") for size in ({"T": 0}, {"B": 0})])
""")
    assert found["calls"] == [[]] * 4


def test_tuning_measures_the_kernels(run):
    """The kernels are measured beside XLA, and a call without TF32 has its own text."""
    found = run("""
from jaxgrad._src.choice.measured_choices import Recorder
from jaxgrad._src.gru.measurable import measurable
recorder = Recorder()
with jaxgrad.config.override(tuning=recorder):
    lowered(), lowered(precision="highest"), lowered(dtype="bfloat16")
functions = [list(measurable(recorded.call, "cuda").functions) for recorded in recorder.calls.values()]
report(texts=list(recorder.calls), functions=functions)
""")
    assert found["texts"] == [
        "gru f32 T=10 B=4 I=8 H=43 D=1",
        "gru f32 T=10 B=4 I=8 H=43 D=1 without TF32",
        "gru bf16 T=10 B=4 I=8 H=43 D=1",
    ]
    assert found["functions"] == [["cuda", "xla"]] * 3


def test_the_handlers_accept_what_the_backend_passes(run):
    """Every setting runs on the fake GPU, whose kernels compute nothing."""
    found = run("""
import itertools
import fake_gpu
from gru_cases import OPTIONAL, Case, make_inputs
from gru_running import values_and_gradients
from backends import Backend
backend = Backend("cuda", "cpu")
count = 0
settings = itertools.product(("forward", "reverse", "bidirectional"), (False, True), ("float32", "bfloat16", "float16"))
for i, (direction, linear_before_reset, dtype) in enumerate(settings):
    H = (5, 140, 300)[i // 3 % 3]
    case = Case(T=4, B=3, I=2, H=H, direction=direction, linear_before_reset=linear_before_reset)
    fewer = case.bare() if i % 2 else case.replace(**{OPTIONAL[i % 5]: False}, clip=0.5)
    for case in (case, fewer):
        inputs, cotangents = make_inputs(case, dtype)
        y, y_h, gradients = values_and_gradients(backend, inputs, cotangents, case.settings)
        assert y.shape == cotangents.y.shape and y_h.shape == cotangents.y_h.shape
        count += 1
report(count=count)
""")
    assert found["count"] == 36


def test_a_program_that_runs_on_another_gpu(run):
    """The handlers choose the kernels for the GPU on which they run, where the workspace may be too small."""
    found = run("""
import os
import fake_gpu

def compiled(multiprocessors, **sizes):
    os.environ["FAKE_MULTIPROCESSORS"] = str(multiprocessors)
    given = {name: np.ones(a.shape, a.dtype) for name, a in arrays(**sizes).items()}
    program = jax.jit(lambda given: jaxgrad.gru(**given, implementation="cuda")).lower(given).compile()
    jax.clear_caches()
    return lambda: jax.block_until_ready(program(given))

def ran_on(multiprocessors, program):
    os.environ["FAKE_MULTIPROCESSORS"] = str(multiprocessors)
    return str(fake_gpu.outcome(program))[:400]

many, wide = compiled(132, B=64, H=512), compiled(132, B=64, H=2000, dtype="bfloat16")
few = compiled(32, B=100, H=512)
report(same=ran_on(132, many), fewer_teams=ran_on(40, many), too_small=ran_on(100, wide), larger=ran_on(132, few))
""")
    assert "Error" not in found["same"]
    assert "Error" not in found["fewer_teams"]
    assert "2000 hidden units do not fit in the 100 multiprocessors of the GPU" in found["too_small"]
    assert "are needed: was the program compiled for another GPU?" in found["larger"]


def test_captures_retain_a_kernel_once(run):
    """A CUDA graph keeps the code that it runs. Another graph of the same kernel keeps nothing more, also after
    `jax.clear_caches`, which frees kernels without a graph.
    """
    found = run("""
import fake_gpu
given = {name: np.ones(a.shape, a.dtype) for name, a in arrays().items()}
program = jax.jit(lambda given: jaxgrad.gru(**given, implementation="cuda")).lower(given).compile()
loaded = [fake_gpu.fake.fake_modules()]
jax.clear_caches()
loaded.append(fake_gpu.fake.fake_modules())
fake.fake_capture(1)
retained = []
for _ in range(20):
    jax.block_until_ready(program(given))
    retained.append(cuda.module.conv_plan_cache_info()["recorded"])
    jax.clear_caches()
report(retained=retained, loaded=[*loaded, fake_gpu.fake.fake_modules()])
""")
    assert found["retained"] == [1] * 20
    before, after, recorded = found["loaded"]
    assert before >= 1
    assert after == 0
    assert recorded == 1
