"""Which convolutions `jaxgrad.accelerate` reaches: around and inside others, nested, in threads."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accelerated import PASSES, close, convolve, convolve_arrays, passes
from backends import CUDNN, ONEDNN
from cuda_module import NEEDS_CUDA_MODULE
from jax import lax
from op_cases import loss

import jaxgrad

pytestmark = pytest.mark.jax_version

BACKENDS = (ONEDNN, CUDNN)
ACCELERATED, PLAIN = {"onednn": 3}, {"xla": 3}


def _loss(x, w):
    return loss(convolve(x, w))


def _by_all(function):
    return jax.grad(function, (0, 1))


def _under_context(function):
    def call(*arrays):
        with jaxgrad.accelerate():
            return function(*arrays)

    return call


def _counts(function, arrays=None):
    return jaxgrad.report(function, *(arrays or convolve_arrays()), platform="cpu").counts


ORDERS = {
    "jit(grad(accelerate))": lambda f, accelerate: jax.jit(_by_all(accelerate(f))),
    "jit(accelerate(grad))": lambda f, accelerate: jax.jit(accelerate(_by_all(f))),
    "accelerate(jit(grad))": lambda f, accelerate: accelerate(jax.jit(_by_all(f))),
    "accelerate(grad(jit))": lambda f, accelerate: accelerate(_by_all(jax.jit(f))),
    "grad(jit(accelerate))": lambda f, accelerate: _by_all(jax.jit(accelerate(f))),
    "grad(accelerate(jit))": lambda f, accelerate: _by_all(accelerate(jax.jit(f))),
}


@pytest.mark.parametrize("accelerate", [jaxgrad.accelerate, _under_context], ids=["decorator", "context"])
@pytest.mark.parametrize("name", ORDERS)
def test_before_and_after_jit_and_grad(name, accelerate):
    """The function under `jax.jit` was called before without the mark."""
    inner = jax.jit(_loss)
    inner(*convolve_arrays())
    for function in (_loss, inner):
        run = ORDERS[name](function, accelerate)
        assert _counts(run) == ACCELERATED
    close(run(*convolve_arrays()), _by_all(_loss)(*convolve_arrays(np.float64)), terms=1000)
    assert _counts(_by_all(inner)) == PLAIN


def test_a_function_that_was_traced_before_keeps_its_program():
    """It is traced once without and once with the mark, and neither program is lost."""
    traces = []

    @jax.jit
    def function(x, w):
        traces.append(1)
        return convolve(x, w)

    accelerated, arrays = jaxgrad.accelerate(function), convolve_arrays()
    for _ in range(2):
        plain, fast = function.lower(*arrays), accelerated.lower(*arrays)
        assert passes(plain) == {"xla": 1}
        assert passes(fast) == {"forward": 1}
        close(function(*arrays), plain.compile()(*arrays))
        close(accelerated(*arrays), plain.compile()(*arrays))
    assert len(traces) == 2


def test_only_the_marked_part_of_a_program():
    """Gradients of an unmarked part are not marked, whatever is marked around them."""

    def both(x, w):
        return _loss(jnp.tanh(jaxgrad.accelerate(convolve)(x, w)), jnp.tile(w, (1, 2, 1, 1))[:, :4])

    assert _counts(_by_all(both)) == {"onednn": 3, "xla": 3}


def test_nesting():
    x, w = convolve_arrays()
    on, off = jaxgrad.accelerate(), jaxgrad.accelerate(implementation="xla")

    def nested(x, w):
        found = [convolve(x, w)]
        with on:
            found.append(convolve(x, w))
            with off:
                found.append(convolve(x, w))
                with on, on:
                    found.append(convolve(x, w))
                found.append(off(convolve)(x, w))
            found.append(convolve(x, w))
            found.append(off(convolve)(x, w))
        return [*found, convolve(x, w)]

    rows = jaxgrad.report(nested, x, w, platform="cpu").convolutions
    expanded = [row for row in rows for _ in range(row.count)]
    assert sorted(row.implementation for row in expanded) == ["onednn"] * 3 + ["xla"] * 5
    assert {row.reason for row in rows} == {"oneDNN", "not accelerated", "acceleration is switched off"}
    assert _counts(off(on(_loss))) == {"onednn": 1}
    assert _counts(on(off(_loss))) == {"xla": 1}


def test_lowering_for_two_platforms_under_the_context_manager():
    """Each platform has its own convolutions: of oneDNN, and of XLA for the other platform."""
    with jaxgrad.accelerate(implementation="onednn"):
        lowered = jax.jit(_by_all(_loss)).trace(*convolve_arrays()).lower(lowering_platforms=("cpu", "cuda"))
    assert passes(lowered) == {"forward": 1, "input_gradient": 1, "weight_gradient": 1, "xla": 3}


def test_a_convolution_that_the_lowering_rule_writes_is_exempt():
    """Also while a program is lowered under the context manager. XLA miscompiles this one unless x is padded."""

    def function(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), [(-1, 2), (-1, 2)])

    x, w = np.ones((1, 1, 5, 5), np.float32), np.ones((1, 1, 2, 2), np.float32)
    with jaxgrad.accelerate(implementation="cuda"):
        text = jax.jit(function).trace(x, w).lower(lowering_platforms=("cpu",)).as_text()
    (convolution,) = (line for line in text.splitlines() if "stablehlo.convolution" in line)
    assert "stablehlo.optimization_barrier" in text
    assert 'jaxgrad = "xla"' in convolution


def test_an_error_inside_ends_the_block():
    for accelerate in (jaxgrad.accelerate(), jaxgrad.accelerate):
        with pytest.raises(TypeError):
            accelerate(convolve)(*convolve_arrays(), None)
        assert _counts(_loss) == {"xla": 1}


def test_one_context_manager_in_two_threads():
    """Both threads are inside the same object at once, and each returns to what it had outside."""
    acceleration, off = jaxgrad.accelerate(), jaxgrad.accelerate(implementation="xla")
    inside, left = threading.Barrier(2), threading.Event()

    def reason():
        (row,) = jaxgrad.report(_loss, *convolve_arrays(), platform="cpu").convolutions
        return row.reason

    def first():
        with acceleration:
            inside.wait(60)
            found = reason()
        left.set()
        return found, reason()

    def second():
        with off:
            with acceleration:
                inside.wait(60)
                assert left.wait(60)
                found = reason()
            return found, reason()

    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(call) for call in (first, second)]
        found = [result.result() for result in results]
    assert found == [("oneDNN", "not accelerated"), ("oneDNN", "acceleration is switched off")]


def test_sixteen_threads():
    """Half of them marked; they trace, lower and call one jitted function, over and over."""
    function, arrays = jax.jit(_by_all(_loss)), convolve_arrays()
    begin = threading.Barrier(16)

    def call(accelerated):
        run = jaxgrad.accelerate(function) if accelerated else function
        begin.wait(60)
        return [(set(passes(run.lower(*arrays))), run(*arrays)) for _ in range(3)]

    marked = [index % 2 == 0 for index in range(16)]
    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(call, marked))
    reference = function(*arrays)
    for accelerated, found in zip(marked, results, strict=True):
        for program, value in found:
            assert program == (PASSES if accelerated else {"xla"})
            close(value, reference)


def test_calls_return_before_completion():
    """The program holds other work too: XLA's CPU client runs a lone custom call on the calling thread."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=shape), "float32") for shape in ((8, 64, 96, 96), (64, 64, 3, 3)))
    call = jax.jit(jaxgrad.accelerate(lambda x, w: convolve(x + 1, w)))
    assert set(passes(call.lower(x, w))) == {"forward"}
    jax.block_until_ready(call(x, w))
    for _ in range(20):  # other processes may delay a single attempt
        start = time.perf_counter()
        result = call(x, w)
        returned = time.perf_counter() - start
        jax.block_until_ready(result)
        if returned < (time.perf_counter() - start) / 4:
            return
    pytest.fail("none of twenty calls returned before completion")


@NEEDS_CUDA_MODULE
def test_settings_are_part_of_the_program():
    """For cuDNN; a function that was traced before is traced again."""
    run, arrays = jax.jit(jaxgrad.accelerate(_by_all(_loss), implementation="cudnn")), convolve_arrays()

    def lowered():
        return run.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()

    before = lowered()
    assert "xla" not in passes(before)
    with jaxgrad.config.override(deterministic=True):
        inside = lowered()
    assert "xla" not in passes(inside)
    assert inside != before
    assert lowered() == before


@pytest.mark.parametrize("accelerated", [False, True])
def test_direct_calls_keep_their_selection(backend, accelerated):
    """Calls of jaxgrad's ops inside an accelerated function, and their gradients."""
    x, w = backend.put(convolve_arrays())

    def lowered(implementation):
        def function(x, w):
            return loss(jaxgrad.conv_general_dilated(x, w, (1, 1), "SAME", implementation=implementation))

        run = jaxgrad.accelerate(_by_all(function)) if accelerated else _by_all(function)
        return set(passes(jax.jit(run).lower(x, w)))

    assert lowered("xla") == {"xla"}
    assert "xla" not in lowered(backend.implementation)


@pytest.mark.parametrize("implementation", ["onednn", pytest.param("cudnn", marks=NEEDS_CUDA_MODULE)])
def test_a_forced_implementation_keeps_direct_calls(implementation):
    """Over implementation="xla", and for a platform that the direct call forces."""
    x, w = convolve_arrays()

    def direct(x, w):
        return jaxgrad.conv_general_dilated(x, w, (1, 1), "SAME", implementation=implementation)

    off = jaxgrad.accelerate(direct, implementation="xla")
    platform = "cpu" if implementation == "onednn" else "cuda"
    text = jax.jit(off).trace(x, w).lower(lowering_platforms=(platform,)).as_text()
    assert passes(text) == {"forward": 1}
