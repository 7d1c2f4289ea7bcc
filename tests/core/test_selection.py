"""Which implementation a call selects: the report of `explain`, and calls without the compiled module."""

from __future__ import annotations

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gru_cases import Case, make_inputs

import jaxgrad
from jaxgrad._src.choice.op import IMPLEMENTATIONS, OPS, platform_of
from jaxgrad._src.native import cuda

pytestmark = pytest.mark.jax_version

CASE = Case(T=5, B=3, I=4, H=6)


def _inputs():
    return make_inputs(CASE, "float32")[0]._asdict()


def _on_a_gpu():
    """What this machine selects for a GPU, and why."""
    if not cuda.targets():
        return "xla", "CUDA kernels of jaxgrad are missing"
    if cuda.gpu_ordinal() is None:
        return "xla", "compiled for the GPU of the machine that lowers the program, which has none"
    if float(jax.devices("gpu")[0].compute_capability) < 8:
        return "xla", "compute capability 8.0 or later"
    return "cuda", "jaxgrad's own kernel"


@pytest.mark.parametrize(
    ("arguments", "implementation", "reason"),
    [
        ({"platform": "cpu"}, "cpu", "CPU kernel"),
        ({"platform": "gpu"}, *_on_a_gpu()),
        ({"platform": "tpu"}, "xla", "no gru kernel for the platform 'tpu'"),
        ({"platform": "cpu", "implementation": "cpu"}, "cpu", "forced"),
        ({"platform": "cpu", "implementation": "xla"}, "xla", "forced"),
        ({"platform": "gpu", "implementation": "xla"}, "xla", "forced"),
    ],
)
@pytest.mark.parametrize("with_arrays", [False, True])
def test_explain(arguments, implementation, reason, with_arrays):
    choice = jaxgrad.explain(jaxgrad.gru, **(_inputs() if with_arrays else {}), **arguments)
    assert (choice.op, choice.platform, choice.implementation) == ("gru", arguments["platform"], implementation)
    assert reason in choice.reason
    assert "gru" in str(choice)
    assert repr(implementation) in str(choice)
    assert choice.reason in str(choice)


def test_explain_takes_the_default_platform():
    expected = "cpu" if jax.default_backend() == "cpu" else _on_a_gpu()[0]
    assert jaxgrad.explain(jaxgrad.gru, **_inputs()).implementation == expected


def test_explain_runs_nothing_and_takes_shapes():
    shapes = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in _inputs().items()}
    del shapes["sequence_lens"]
    choice = jaxgrad.explain(jaxgrad.gru, **shapes, platform="cpu", clip=0.5)
    assert choice.implementation == "cpu"


@pytest.mark.parametrize("settings", [{"clip": np.float32(0.5)}, {"linear_before_reset": np.True_}], ids=repr)
def test_explain_takes_numpy_scalars_as_the_call_does(settings):
    jaxgrad.gru(**_inputs(), **settings)
    assert jaxgrad.explain(jaxgrad.gru, **_inputs(), platform="cpu", **settings).implementation == "cpu"


def test_explain_rejects_a_kernel_of_another_platform():
    with pytest.raises(ValueError, match=r"jaxgrad.gru: implementation='cpu'.*'cpu' only, got 'gpu'"):
        jaxgrad.explain(jaxgrad.gru, **_inputs(), implementation="cpu", platform="gpu")


def gru(x, w, r):
    """A function that only shares the name of an op."""
    return x


@pytest.mark.parametrize(
    "op", [np.sin, jax.lax.scan, gru, None, "gru"], ids=["numpy", "jax", "namesake", "none", "text"]
)
def test_explain_rejects_other_functions(op):
    with pytest.raises(ValueError, match=r"jaxgrad.explain: op must be one of jaxgrad's ops \(.*gru.*\), got"):
        jaxgrad.explain(op)


@pytest.mark.parametrize(
    ("changes", "settings", "error", "message"),
    [
        ({"w": np.zeros((1, 18, 5), np.float32)}, {}, ValueError, "w must have the shape"),
        ({"x": np.zeros((5, 3, 4), np.int32)}, {}, TypeError, "x must have one of the dtypes"),
        ({"sequence_lens": np.array([1, 2, 9])}, {}, ValueError, r"sequence_lens must lie in \[0, T\]"),
        ({}, {"direction": "up"}, ValueError, "direction must be one of"),
        ({}, {"clip": 0}, ValueError, "clip must be positive"),
        ({}, {"implementation": "metal"}, ValueError, "implementation must be one of"),
    ],
)
@pytest.mark.parametrize("by_name", [False, True])
def test_explain_raises_as_the_call_does(changes, settings, error, message, by_name):
    inputs = _inputs() | changes
    positional = [] if by_name else [inputs.pop(name) for name in ("x", "w", "r", "b", "sequence_lens", "initial_h")]
    for call in (jaxgrad.gru, lambda *a, **k: jaxgrad.explain(jaxgrad.gru, *a, **k)):
        with pytest.raises(error, match=message):
            call(*positional, **inputs, **settings)


def test_explain_takes_a_jitted_op():
    """The cache of the jitted function does not hide the selection."""
    call = jax.jit(jaxgrad.gru)
    arrays = list(_inputs().values())[:3]
    for _ in range(2):
        assert jaxgrad.explain(call, *arrays, platform="cpu").implementation == "cpu"


def test_explain_takes_every_partial_op():
    """Also those with the attributes of the op, and equinox's own."""
    x, w = jnp.ones((2, 8, 9, 7)), jnp.ones((6, 8, 3, 3))
    op, settings = jaxgrad.conv_general_dilated, {"window_strides": (1, 1), "padding": "SAME"}
    expected = jaxgrad.explain(op, x, w, **settings)
    for partial in (functools.wraps(op)(functools.partial(op, **settings)), eqx.Partial(op, **settings)):
        for function in (partial, jaxgrad.accelerate(partial), jax.jit(partial)):
            assert jaxgrad.explain(function, x, w) == expected


def test_explain_takes_a_partial_op():
    x, *weights = list(_inputs().values())[:3]
    on_xla = functools.partial(jaxgrad.gru, x, implementation="xla")
    assert jaxgrad.explain(on_xla, *weights, platform="cpu").reason == "forced by implementation='xla'"
    explained = jaxgrad.explain(functools.partial(on_xla, *weights), implementation="cpu", platform="cpu")
    assert explained.reason == "forced by implementation='cpu'"
    assert jaxgrad.explain(jax.jit(on_xla), *weights, platform="cpu").reason == "forced by implementation='xla'"
    functools.update_wrapper(loop := lambda x: x, loop)
    with pytest.raises(ValueError, match="wrapper loop"):
        jaxgrad.explain(loop, x)


@pytest.mark.parametrize(
    ("name", "on_a_gpu"),
    [
        ("conv_general_dilated", "'cuda', 'cudnn', 'xla'"),
        ("batch_norm_training", "'cuda', 'cudnn', 'xla'"),
        ("batch_norm_inference", "'cuda', 'xla'"),
        ("gru", "'cuda', 'xla'"),
    ],
)
def test_a_platform_is_no_implementation(name, on_a_gpu):
    with pytest.raises(
        ValueError, match=rf"jaxgrad.{name}: implementation must be .*, got 'gpu'; on a GPU: {on_a_gpu}$"
    ):
        jaxgrad.explain(getattr(jaxgrad, name), implementation="gpu")
    with pytest.raises(ValueError, match=r"got 'GPU'; on a GPU: 'cuda', 'cudnn', 'xla'$"):
        jaxgrad.accelerate(implementation="GPU")


def test_explain_of_a_typical_call_that_forces_onednn():
    explained = jaxgrad.explain(jaxgrad.conv_general_dilated, implementation="onednn", platform="cpu")
    assert (explained.implementation, explained.passes) == ("onednn", ())
    with pytest.raises(ValueError, match="implementation='onednn' runs on the platform 'cpu' only"):
        jaxgrad.explain(jaxgrad.conv_general_dilated, implementation="onednn", platform="gpu")


def test_explain_checks_the_names_of_arguments_without_arrays():
    with pytest.raises(TypeError, match=r"jaxgrad.gru: got an unexpected keyword argument 'implemantation'"):
        jaxgrad.explain(jaxgrad.gru, implemantation="xla")


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        (jaxgrad.gru, {"x": [[[1.0, 2.0]]], "w": [[1.0]], "r": [[2.0]]}),
        (jaxgrad.conv_general_dilated, {"padding": "banana", "feature_group_count": -3}),
    ],
)
def test_explain_refuses_arguments_without_arrays(op, arguments):
    """They would be ignored: a typical call would be explained."""
    names = ", ".join(sorted(arguments))
    with pytest.raises(TypeError, match=f"jaxgrad.explain: a call has arrays, got {names} without any"):
        jaxgrad.explain(op, implementation="xla", **arguments)


def test_explain_raises_for_an_unknown_implementation_without_arrays():
    with pytest.raises(ValueError, match="implementation must be one of"):
        jaxgrad.explain(jaxgrad.gru, implementation="metal")


_WITHOUT_MODULE = """
import sys, warnings
sys.modules["jaxgrad._cpu"] = None  # importing it raises ImportError
import jax, numpy as np, gru_references
jax.config.update("jax_enable_x64", True)
from gru_cases import Case, make_inputs
import jaxgrad

case = Case(T=5, B=3, I=4, H=6, direction="bidirectional", linear_before_reset=True)
inputs, cotangents = make_inputs(case)
inputs, cotangents = jax.device_put((inputs, cotangents), jax.devices("cpu")[0])
expected = gru_references.values_and_gradients(inputs, cotangents, **case.settings)

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        outputs = lambda w: jaxgrad.gru(**inputs._replace(w=w)._asdict(), **case.settings)
        (y, y_h), pullback = jax.vjp(outputs, inputs.w)
        np.testing.assert_allclose(y, expected[0], rtol=0, atol=1e-13)
        np.testing.assert_allclose(y_h, expected[1], rtol=0, atol=1e-13)
        np.testing.assert_allclose(pullback(tuple(cotangents))[0], expected[2].w, rtol=0, atol=1e-12)
        jaxgrad.gru(*inputs[:3], direction="bidirectional")
        jax.jit(lambda x: jaxgrad.gru(x, *inputs[1:3], direction="bidirectional"))(inputs.x)
    jaxgrad.gru(**inputs._asdict(), direction="bidirectional", implementation="xla")
ours = [w for w in caught if "jaxgrad" in str(w.message)]
assert len(ours) == 1, [str(w.message) for w in caught]
assert ours[0].category is RuntimeWarning
assert ours[0].filename == "<string>", ours[0].filename  # this script, not a file of jaxgrad
assert "runs on XLA" in str(ours[0].message) and "jaxgrad._cpu" in str(ours[0].message)

try:
    jaxgrad.gru(**inputs._asdict(), direction="bidirectional", implementation="cpu")
except RuntimeError as error:
    assert "jaxgrad.gru: implementation='cpu' cannot run" in str(error), error
    assert "jaxgrad._cpu" in str(error), error
else:
    raise SystemExit("implementation='cpu' ran without the module")

choice = jaxgrad.explain(jaxgrad.gru, *inputs[:3], direction="bidirectional", platform="cpu")
assert choice.implementation == "xla" and "jaxgrad._cpu" in choice.reason, choice
try:
    jaxgrad.explain(jaxgrad.gru, implementation="cpu", platform="cpu")
except RuntimeError as error:
    assert "jaxgrad._cpu" in str(error), error
else:
    raise SystemExit("explain did not raise")

# A depthwise convolution has kernels of jaxgrad and of oneDNN, both of the module.
depthwise = np.ones((1, 6, 8, 8), np.float32), np.ones((6, 1, 3, 3), np.float32), (1, 1), "SAME"
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    jaxgrad.conv_general_dilated(*depthwise, feature_group_count=6)
ours = [str(w.message) for w in caught if "jaxgrad" in str(w.message)]
assert len(ours) == 1, ours
choice = jaxgrad.explain(jaxgrad.conv_general_dilated, *depthwise, feature_group_count=6, platform="cpu")
assert choice.reason.count(" are missing: ") == 1, choice
"""


@pytest.mark.newest
def test_without_the_compiled_module(run_python):
    """Correct results on XLA, one warning, and an error with the reason for a forced kernel."""
    run_python(_WITHOUT_MODULE)


def test_importing_jaxgrad_starts_no_backend(run_python):
    """`jax.config` may select the platform after the import."""
    run_python(
        "import jaxgrad, jax\n"
        "jax.config.update('jax_platforms', 'cpu')\n"
        "jax.config.update('jax_num_cpu_devices', 3)\n"
        "assert len(jax.devices()) == 3\n"
    )


def test_the_public_names():
    assert {"Explanation", "__version__", "explain", "gru"} <= set(jaxgrad.__all__)
    assert all(getattr(jaxgrad, name).__doc__ for name in jaxgrad.__all__ if name != "__version__")


def test_every_device_of_the_host_runs_the_kernel(run_python):
    script = """
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 3)
import jaxgrad
from gru_cases import Case, make_inputs
inputs = make_inputs(Case(), "float32")[0]
results = [jaxgrad.gru(**jax.device_put(inputs, d)._asdict(), implementation="cpu")[0] for d in jax.devices()]
assert [r.devices() for r in results] == [{d} for d in jax.devices()]
assert all((np.asarray(r) == np.asarray(results[0])).all() for r in results)
"""
    run_python(script, JAX_PLATFORMS="cpu")


@pytest.mark.parametrize("platform", ["banana", "", True, 1])
def test_unknown_platforms(platform):
    with pytest.raises(ValueError, match=r"jaxgrad.explain: platform must be one of None, 'cpu', 'gpu'"):
        jaxgrad.explain(jaxgrad.gru, platform=platform)


def test_every_implementation_has_a_name_and_one_platform():
    """`IMPLEMENTATIONS` lists those of all ops, also of ops that are not loaded yet."""
    platforms = {(backend.implementation, backend.platform) for op in OPS.values() for backend in op.backends}
    assert sorted(IMPLEMENTATIONS) == sorted(["xla", *(name for name, _ in platforms)])
    with pytest.raises(LookupError, match="no op that is loaded has the implementation 'mkl'"):
        platform_of("mkl")
