"""Calls that run on XLA: the results of `jax.lax`, and a reason in `explain`."""

from __future__ import annotations

from collections import UserList

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from thorough import thorough_after

import jaxgrad
from jaxgrad._src.conv.kernels import onednn
from jaxgrad._src.conv.read import op_call
from jaxgrad._src.native import cuda

RNG = np.random.default_rng(0)


def _random(shape, dtype="float32"):
    if np.issubdtype(dtype, np.integer):
        return RNG.integers(-9, 10, shape).astype(dtype)
    values = RNG.standard_normal(shape)
    if np.issubdtype(dtype, np.complexfloating):
        values = values + 1j * RNG.standard_normal(shape)
    return values.astype(dtype)


def _case(lhs, rhs, *args, reason, dtype="float32", **kwargs):
    return _random(lhs, dtype), _random(rhs, dtype), args, kwargs, reason


CASES = {
    "no spatial axes": _case((3, 4), (5, 4), (), (), reason="0 spatial dimensions"),
    "four spatial axes": _case((1, 2, 3, 4, 3, 2), (3, 2, 2, 2, 1, 2), (1,) * 4, "SAME", reason="4 spatial dimensions"),
    "batch groups": _case((6, 3, 5, 4), (4, 3, 2, 2), (1, 2), "SAME", batch_group_count=2, reason="batch_group_count"),
    "int8": _case((2, 3, 5), (4, 3, 2), (1,), "SAME", dtype="int8", reason="int8"),
    "int32": _case((2, 3, 5), (4, 3, 2), (1,), "SAME", dtype="int32", reason="int32"),
    "complex64": _case((2, 3, 5), (4, 3, 2), (2,), "SAME", dtype="complex64", reason="complex64"),
    "float64": _case((2, 3, 5, 4), (4, 3, 2, 2), (2, 1), "SAME", dtype="float64", reason="oneDNN has no float64"),
    "float64 in groups": _case(
        (2, 6, 5, 4), (4, 3, 2, 2), (2, 1), "SAME", dtype="float64", feature_group_count=2, reason="no float64"
    ),
    "empty batch": _case((0, 3, 5), (4, 3, 2), (1,), "SAME", reason="without elements"),
    "no features": _case((2, 0, 5), (4, 0, 2), (1,), "SAME", reason="without elements"),
    "no output features": _case((2, 3, 5), (0, 3, 2), (1,), "SAME", reason="without elements"),
    "empty window": _case((2, 3, 5), (4, 3, 0), (1,), ((1, 1),), reason="without elements"),
    "empty result": _case((2, 3, 5), (4, 3, 7), (1,), "VALID", reason="without elements"),
    "empty groups": _case((0, 6, 5), (4, 3, 2), (1,), "SAME", feature_group_count=2, reason="without elements"),
    "both dilated": _case((2, 3, 5, 4), (4, 3, 2, 3), (2, 1), ((1, 2), (3, 0)), (2, 3), reason="lhs_dilation and"),
    "both dilated in groups": _case(
        (2, 6, 5, 4), (4, 3, 2, 3), (1, 2), ((1, 2), (3, 0)), (2, 3), feature_group_count=2, reason="lhs_dilation and"
    ),
    "input all padding": _case((2, 3, 5), (4, 3, 2), (1,), ((-6, 8),), reason="cropping leaves no input"),
    "input all padding in groups": _case(
        (2, 6, 5), (4, 3, 2), (1,), ((-6, 8),), feature_group_count=2, reason="cropping leaves no input"
    ),
    "input cropped to nothing": _case((2, 3, 5), (4, 3, 2), (2,), ((-5, 6),), reason="cropping leaves no input"),
    "result all padding": _case((2, 3, 1), (4, 3, 1), (1,), ((-3, 5),), (4,), reason="cropping leaves no input"),
    "result all padding in groups": _case(
        (2, 6, 1), (4, 3, 1), (1,), ((-3, 5),), (4,), feature_group_count=2, reason="cropping leaves no input"
    ),
}


def _differentiable(lhs):
    return np.issubdtype(lhs.dtype, np.floating)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("implementation", thorough_after(1, [None, "xla"]))
def test_values_and_gradients(name, implementation):
    lhs, rhs, args, kwargs, _ = CASES[name]

    def ours(lhs, rhs):
        return jaxgrad.conv_general_dilated(lhs, rhs, *args, **kwargs, implementation=implementation)

    def plain(lhs, rhs):
        return lax.conv_general_dilated(lhs, rhs, *args, **kwargs)

    try:
        expected = jax.jit(plain)(lhs, rhs)
    except ValueError:
        with pytest.raises(ValueError, match=r"\S"):
            jax.jit(ours)(lhs, rhs)
        return
    y = jax.jit(ours)(lhs, rhs)
    assert (y.shape, y.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5)
    if not _differentiable(lhs):
        return
    weight = jnp.cos(jnp.arange(expected.size, dtype=lhs.dtype)).reshape(expected.shape)
    gradients = jax.grad(lambda *a: jnp.vdot(plain(*a), weight), argnums=(0, 1))
    try:
        desired = gradients(lhs, rhs)
    except (ValueError, TypeError, ZeroDivisionError):
        return  # jax.lax cannot differentiate some calls whose window covers only padding
    found = jax.grad(lambda *a: jnp.vdot(ours(*a), weight), argnums=(0, 1))(lhs, rhs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-4), found, desired)


@pytest.mark.parametrize("name", CASES)
def test_reason_of_each_case(name):
    lhs, rhs, args, kwargs, reason = CASES[name]
    try:
        lax.conv_general_dilated(lhs, rhs, *args, **kwargs)
    except ValueError:
        pytest.skip("jax.lax itself refuses the call")
    choice = jaxgrad.explain(jaxgrad.conv_general_dilated, lhs, rhs, *args, **kwargs, platform="cpu")
    assert (choice.op, choice.implementation) == ("conv_general_dilated", "xla")
    assert reason in choice.reason
    with pytest.raises(
        ValueError, match=r"jaxgrad.conv_general_dilated: implementation='onednn' cannot run: "
    ) as error:
        jaxgrad.conv_general_dilated(lhs, rhs, *args, **kwargs, implementation="onednn")
    assert str(error.value).endswith(choice.reason)


@pytest.mark.parametrize("name", ["float64", "batch groups", "both dilated in groups", "empty batch"])
def test_program_has_no_kernel_call(name):
    lhs, rhs, args, kwargs, _ = CASES[name]
    text = jax.jit(lambda a, b: jaxgrad.conv_general_dilated(a, b, *args, **kwargs)).lower(lhs, rhs).as_text()
    assert "jaxgrad_onednn_conv" not in text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("op", ["conv_general_dilated", "conv_transpose"])
def test_explain_a_typical_call(op, dtype):
    function = getattr(jaxgrad, op)
    lhs, rhs = jax.ShapeDtypeStruct((64, 56, 56, 32), dtype), jax.ShapeDtypeStruct((3, 3, 32, 64), dtype)
    settings = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    choice = jaxgrad.explain(function, lhs, rhs, (1, 1), "SAME", **settings, platform="cpu")
    assert (choice.op, choice.implementation, choice.reason) == (op, "onednn", "oneDNN")
    choice = jaxgrad.explain(function, lhs, rhs, (1, 1), "SAME", **settings, platform="gpu")
    assert choice.implementation == "xla"
    assert choice.reason.startswith("the cuDNN kernels are missing" if cuda.unavailable() else "XLA ")
    choice = jaxgrad.explain(function, lhs, rhs, (1, 1), "SAME", **settings, implementation="xla", platform="cpu")
    assert choice.implementation == "xla"
    assert "forced" in choice.reason


def test_transposed_convolutions_run_on_xla():
    lhs, rhs = _random((2, 5, 4, 3), "float64"), _random((3, 2, 3, 4), "float64")
    y = jaxgrad.conv_transpose(lhs, rhs, (2, 1), "SAME")
    np.testing.assert_allclose(y, lax.conv_transpose(lhs, rhs, (2, 1), "SAME"), rtol=1e-12)
    choice = jaxgrad.explain(jaxgrad.conv_transpose, lhs, rhs, (2, 1), "SAME", platform="cpu")
    assert (choice.op, choice.implementation) == ("conv_transpose", "xla")
    with pytest.raises(ValueError, match=r"jaxgrad.conv_transpose: implementation='onednn' .* float64"):
        jaxgrad.conv_transpose(lhs, rhs, (2, 1), "SAME", implementation="onednn")


def test_default_program_for_a_gpu_runs_on_xla():
    """Lowered without a GPU: the program has no kernel call where XLA is on par with cuDNN."""
    lhs, rhs = jax.ShapeDtypeStruct((64, 64, 56, 56), jnp.float32), jax.ShapeDtypeStruct((64, 64, 3, 3), jnp.float32)
    gradient = jax.jit(jax.grad(lambda a, b: jnp.sum(jaxgrad.conv_general_dilated(a, b, (1, 1), "SAME") ** 2)))
    texts = {p: gradient.trace(lhs, rhs).lower(lowering_platforms=(p,)).as_text() for p in ("cpu", "cuda")}
    assert ["jaxgrad_onednn_conv" in text for text in texts.values()] == [True, False]
    assert ["stablehlo.convolution" in text for text in texts.values()] == [False, True]


def test_a_symbolic_batch_runs_on_xla():
    """There is no plan for a symbolic size; the default implementation accepts it as `jax.lax` does."""
    batch = jax.export.symbolic_shape("b")[0]
    lhs = jax.ShapeDtypeStruct((batch, 3, 5, 4), jnp.float32)
    rhs = _random((6, 3, 2, 2))
    exported = jax.export.export(jax.jit(lambda x: jaxgrad.conv_general_dilated(x, rhs, (1, 1), "SAME")))(lhs)
    x = _random((3, 3, 5, 4))
    np.testing.assert_allclose(exported.call(x), lax.conv_general_dilated(x, rhs, (1, 1), "SAME"), rtol=0, atol=1e-5)


def _passes(*args, **kwargs):
    choice = jaxgrad.explain(jaxgrad.conv_general_dilated, *args, **kwargs, platform="cpu")
    found = {unit.name: unit.implementation for unit in choice.passes}
    return found if len(set(found.values())) > 1 else choice.implementation


def test_xla_is_selected_where_it_is_faster():
    def shapes(*shapes):
        return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

    tiny = shapes((1, 1, 8, 8), (1, 1, 3, 3))
    assert _passes(*tiny, (1, 1), "SAME") == "xla"
    assert (
        "few multiplications"
        in jaxgrad.explain(jaxgrad.conv_general_dilated, *tiny, (1, 1), "SAME", platform="cpu").reason
    )
    assert _passes(*tiny, (1, 1), "SAME", implementation="onednn") == "onednn"
    assert _passes(*shapes((1, 8, 8, 8), (8, 1, 3, 3)), (1, 1), "SAME", feature_group_count=8) == "cpu"
    patches = shapes((2, 3, 64, 64), (8, 3, 32, 32))
    expected = {"forward": "onednn", "input_gradient": "xla", "weight_gradient": "xla"}
    assert _passes(*patches, (32, 32), "VALID") == expected
    assert _passes(*patches, (31, 32), "VALID") == "onednn"  # the windows overlap


@pytest.mark.parametrize("implementation", [None, "onednn"])
def test_a_mapped_shape_without_a_onednn_kernel(monkeypatch, implementation):
    """The call alone has kernels, what vmap makes of it has none: XLA takes it, or a forced call says why it cannot."""
    plan = onednn.onednn_plan

    def plan_of_single_calls(pass_name, problem, has_bias):
        return None if problem.num_problems else plan(pass_name, problem, has_bias)

    monkeypatch.setattr(onednn, "onednn_plan", plan_of_single_calls)
    lhs, rhs = _random((3, 2, 7, 9, 8)), _random((3, 4, 7, 3, 3))
    mapped = jax.vmap(lambda a, b: jaxgrad.conv_general_dilated(a, b, (1, 1), "SAME", implementation=implementation))
    if implementation == "onednn":
        with pytest.raises(NotImplementedError, match="forward"):
            mapped(lhs, rhs)
    else:
        plain = jax.vmap(lambda a, b: lax.conv_general_dilated(a, b, (1, 1), "SAME"))
        np.testing.assert_allclose(mapped(lhs, rhs), plain(lhs, rhs), rtol=0, atol=1e-4)


# --- the cache of calls -------------------------------------------------------------------------------------------


@pytest.fixture
def read():
    """Returns a function that counts the misses and the hits of the cache."""
    op_call._read.cache_clear()
    return lambda: op_call._read.cache_info()[:2][::-1]


def test_a_call_is_read_once(read):
    lhs, rhs = _random((2, 3, 5, 4)), _random((6, 3, 2, 2))
    for window_strides, padding in (((1, 1), "SAME"), ([1, 1], "SAME"), (np.ones(2, int), "SAME")):
        jaxgrad.conv_general_dilated(lhs, rhs, window_strides, padding)
    assert read() == (1, 2)
    choices = {jaxgrad.explain(jaxgrad.conv_general_dilated, lhs, rhs, (1, 1), "SAME", platform="cpu") for _ in "ab"}
    assert len(choices) == 1
    assert read() == (1, 4)


@pytest.mark.parametrize("change", ["shape", "dtype", "padding", "bias", "groups"])
def test_another_call_is_read_anew(read, change):
    lhs, rhs = _random((2, 4, 5, 4)), _random((6, 4, 2, 2))
    jaxgrad.conv_general_dilated(lhs, rhs, (1, 1), "SAME")
    kwargs: dict = {"padding": "SAME"}
    if change == "shape":
        lhs = _random((3, 4, 5, 4))
    elif change == "dtype":
        lhs, rhs = lhs.astype("float64"), rhs.astype("float64")
    elif change == "padding":
        kwargs["padding"] = ((2, 0), (1, 1))
    elif change == "bias":
        kwargs["bias"] = _random((6,))
    else:
        rhs, kwargs["feature_group_count"] = _random((6, 2, 2, 2)), 2
    y = jaxgrad.conv_general_dilated(lhs, rhs, (1, 1), **kwargs)
    bias = kwargs.pop("bias", np.zeros(6, lhs.dtype))
    expected = lax.conv_general_dilated(lhs, rhs, (1, 1), **kwargs) + bias[:, None, None]
    assert (y.shape, y.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5)
    assert read() == (2, 0)


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")
def test_enable_x64_is_part_of_the_cache_key(read):
    lhs, rhs = _random((2, 3, 5)), _random((4, 3, 2))
    for wide in (False, True, False):
        with jax.enable_x64(wide):
            y = jaxgrad.conv_general_dilated(lhs, rhs, (1,), "SAME", preferred_element_type=jnp.float64)
            assert y.dtype == (jnp.float64 if wide else jnp.float32)
    assert read() == (2, 1)


def test_unhashable_settings_run_without_the_cache(read):
    lhs, rhs = _random((2, 3, 5, 4)), _random((6, 3, 2, 2))
    expected = lax.conv_general_dilated(lhs, rhs, (1, 1), ((1, 0), (2, 1)))
    for _ in range(2):
        y = jaxgrad.conv_general_dilated(lhs, rhs, (1, 1), UserList([(1, 0), (2, 1)]))
        np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5)
    assert read() == (0, 0)


def test_errors_are_raised_on_every_call():
    lhs, rhs = _random((2, 3, 5, 4)), _random((6, 5, 2, 2))
    for _ in range(2):
        with pytest.raises(ValueError, match="lhs feature dimension"):
            jaxgrad.conv_general_dilated(lhs, rhs, (1, 1), "SAME")


def test_a_forced_kernel_is_asked_for_a_plan_where_xla_is_faster(monkeypatch):
    """A problem that XLA would run faster is refused, too, if oneDNN has no optimized kernel for it."""
    shapes = jax.ShapeDtypeStruct((1, 1, 8, 8), jnp.float32), jax.ShapeDtypeStruct((1, 1, 3, 3), jnp.float32)
    monkeypatch.setattr(onednn, "onednn_plan", lambda *_: None)
    with pytest.raises(ValueError, match="implementation='onednn' cannot run: oneDNN has no optimized kernel"):
        jaxgrad.explain(jaxgrad.conv_general_dilated, *shapes, (1, 1), "SAME", implementation="onednn", platform="cpu")
