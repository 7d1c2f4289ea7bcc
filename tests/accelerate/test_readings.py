"""Which pass an accelerated convolution is, and which pass computes it, where its shapes leave that open."""

from __future__ import annotations

import jax
import pytest

import jaxgrad
from jaxgrad._src.conv.equation import Equation

_LAYOUTS = {"last": ("NHWC", "HWIO", "NHWC"), "first": ("NCHW", "OIHW", "NCHW")}
_PASSES = ["forward", "weight_gradient", "input_gradient"]  # in the order in which JAX writes them


def _layer(spatial, window: int, features: int, out_features: int, groups: int, channels: str = "last"):
    """A convolution with its gradients, and the shapes of x and w."""
    x, w = (16, *spatial, features), (window, window, features // groups, out_features)
    if channels == "first":
        x, w = (16, features, *spatial), (out_features, features // groups, window, window)

    def layer(x, w):
        y, gradients = jax.vjp(
            lambda x, w: jax.lax.conv_general_dilated(
                x, w, (1, 1), "SAME", dimension_numbers=_LAYOUTS[channels], feature_group_count=groups
            ),
            x,
            w,
        )
        return y, gradients(y)

    return layer, *(jax.ShapeDtypeStruct(shape, "float32") for shape in (x, w))


def _equations(layer, *arrays) -> list[Equation]:
    found = (eqn for eqn in jax.make_jaxpr(layer)(*arrays).eqns if eqn.primitive is jax.lax.conv_general_dilated_p)
    return [Equation.of(eqn.params, [var.aval for var in (*eqn.invars, *eqn.outvars)]) for eqn in found]


@pytest.mark.parametrize("channels", _LAYOUTS)
@pytest.mark.parametrize("groups", [96, 8, 1])
@pytest.mark.parametrize("spatial", [(2, 3), (5, 6), (7, 6), (7, 7), (8, 9)])
def test_the_report_names_each_pass_as_it_is_written(spatial, groups, channels):
    """Windows of 7x7 over inputs that are smaller, as large, and larger."""
    layer, *arrays = _layer(spatial, 7, 96, 96, groups, channels)
    rows = jaxgrad.report(jaxgrad.accelerate(layer), *arrays, platform="cpu").convolutions
    assert [row.pass_name for row in rows] == _PASSES
    assert {row.implementation for row in rows} <= ({"cpu", "onednn"} if groups == 96 else {"onednn"})


@pytest.mark.parametrize(("size", "computed_as"), [(16, "weight_gradient"), (24, "forward")])
def test_a_window_far_larger_than_the_result_is_computed_as_a_weight_gradient(size, computed_as):
    x, w = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((4, 3, size, size), (5, 3, 15, 15)))
    (equation,) = _equations(lambda x, w: jax.lax.conv(x, w, (1, 1), "VALID"), x, w)
    plan = equation.plan("cpu", None)
    assert (plan.pass_name, plan.computed_as) == ("forward", computed_as)


@pytest.mark.parametrize("spatial", [(5, 5), (6, 7), (7, 7)])
def test_depthwise_passes_are_computed_as_such(spatial):
    """Other passes compute them too, 10 to 100 times as slowly: as groups of many features, or as many problems."""
    layer, *arrays = _layer(spatial, 7, 96, 96, 96)
    plans = [each.plan("cpu", None) for each in _equations(layer, *arrays)]
    assert [plan.computed_as for plan in plans] == _PASSES
    assert {plan.implementation for plan in plans} <= {"cpu", "onednn"}


@pytest.mark.parametrize("spatial", [(5, 5), (6, 7), (7, 7)])
def test_a_tuning_measures_each_pass_as_it_is_written(spatial):
    layer, *arrays = _layer(spatial, 7, 96, 96, 96)
    for each, name in zip(_equations(layer, *arrays), _PASSES, strict=True):
        assert {f"{name} on cpu", f"{name} on onednn"} <= each.alternatives("cpu").keys()


def test_a_weight_gradient_of_few_positions_is_computed_by_its_window():
    """Its kernel takes twice as long. The report still says what it is."""
    layer, *arrays = _layer((2, 2), 5, 64, 48, 1)
    _, weight_gradient, _ = _equations(layer, *arrays)
    plan = weight_gradient.plan("cpu", None)
    assert (plan.pass_name, plan.name) == ("weight_gradient", "input_gradient on onednn")
    assert "weight_gradient on onednn" in weight_gradient.alternatives("cpu")


def test_a_weight_gradient_without_a_kernel_keeps_its_form_on_xla():
    """It is not computed by its window, for which XLA has no form."""
    layer, *arrays = _layer((5, 6), 7, 96, 96, 8)
    arrays = [jax.ShapeDtypeStruct(array.shape, "float64") for array in arrays]
    _, weight_gradient, _ = _equations(layer, *arrays)
    assert weight_gradient.plan("cpu", None).name == "weight_gradient on xla"


def test_weight_gradients_of_examples_are_computed_as_such():
    """By their windows, of fewer positions than the result has elements, they would be groups of one large pass."""
    layer, x, w = _layer((2, 2), 5, 8, 16, 1)
    x = jax.ShapeDtypeStruct((30, *x.shape), x.dtype)
    _, weight_gradient, _ = _equations(jax.vmap(layer, (0, None)), x, w)
    assert weight_gradient.arguments.feature_group_count == 30
    assert weight_gradient.plan("cpu", None).name == "weight_gradient on onednn"
