"""How a convolution, as `jax.lax` takes it, is computed by one of the three passes.

  ForwardCall          no input dilation
  InputGradientCall    unit window strides: the transpose of another convolution
  WeightGradientCall   the result is the weight gradient of another convolution, whose window is as large as the result;
                       its batch is the features of this one

A convolution may have several readings: with unit strides and dilation it has all three.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
from jax import lax

from jaxgrad._src.conv import autodiff, jvp
from jaxgrad._src.conv.call.geometry import (
    ConvGeometry,
    Pairs,
    dilated_size,
    pad_spatial,
    swap_features,
    unread_padding,
    unusual,
)
from jaxgrad._src.conv.call.params import ConvParams
from jaxgrad._src.conv.call.problem import ConvProblem
from jaxgrad._src.conv.on_xla.xla import add_bias_and_relu
from jaxgrad._src.conv.passes import (
    forward_pass,
    forward_rule,
    input_gradient_pass,
    input_gradient_rule,
    weight_gradient_pass,
)
from jaxgrad._src.run import forward_mode
from jaxgrad._src.run.batching import fold, unfold
from jaxgrad._src.run.mesh_axes import explicit_mesh


@dataclasses.dataclass(frozen=True)
class ConvArguments:
    """The shapes and arguments of a convolution, as ints: padding has pairs, dilation is given, layouts are axes.

    `window_reversed` says whether the window of rhs is reversed first.
    """

    lhs_shape: tuple[int, ...]
    rhs_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    dimension_numbers: lax.ConvDimensionNumbers
    window_strides: tuple[int, ...]
    padding: Pairs
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    feature_group_count: int = 1
    batch_group_count: int = 1
    window_reversed: bool = False

    @property
    def lhs_spatial(self) -> tuple[int, ...]:
        return tuple(self.lhs_shape[axis] for axis in self.dimension_numbers.lhs_spec[2:])

    @property
    def window(self) -> tuple[int, ...]:
        return tuple(self.rhs_shape[axis] for axis in self.dimension_numbers.rhs_spec[2:])

    @property
    def out_spatial(self) -> tuple[int, ...]:
        return tuple(self.out_shape[axis] for axis in self.dimension_numbers.out_spec[2:])

    def unusual(self) -> list[str]:
        """The arguments that differ from their defaults, as texts."""
        return unusual(
            window_strides=self.window_strides,
            padding=self.padding,
            lhs_dilation=self.lhs_dilation,
            rhs_dilation=self.rhs_dilation,
            feature_group_count=self.feature_group_count,
            batch_group_count=self.batch_group_count,
        )

    @property
    def is_input_dilated(self) -> bool:
        return max(self.lhs_dilation) > 1

    @property
    def is_strided(self) -> bool:
        return max(self.window_strides) > 1


@dataclasses.dataclass(frozen=True)
class PassCall:
    """A convolution as a call of one pass.

    Attributes:
      pass_name: the pass.
      geometry: the geometry of the pass.
      sizes: the batch, the input features and the output features of its problem.
    """

    geometry: ConvGeometry
    sizes: tuple[int, int, int]

    pass_name: ClassVar[str]

    def problem(self, dtype: Any) -> ConvProblem:
        """The problem of the pass for operands of a dtype."""
        return ConvProblem(self.geometry, *self.sizes, dtype)

    def compute(self, params: ConvParams, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        """The result of the convolution, by the pass, without rules for differentiation."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class ForwardCall(PassCall):
    """A forward pass, after x is cropped where the padding is negative."""

    crop: Pairs

    pass_name: ClassVar[str] = "forward"

    def compute(self, params: ConvParams, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return forward_pass(params)(pad_spatial(lhs, self.geometry.lhs_spec, self.crop), rhs, None)

    def run(self, params: ConvParams, lhs: jax.Array, rhs: jax.Array, bias: jax.Array | None, relu: bool) -> jax.Array:
        """The differentiable call."""
        if mesh := explicit_mesh(lhs, rhs, bias):
            lhs, rhs, bias = forward_rule(params).reshard(mesh, (lhs, rhs, bias))
        lhs = pad_spatial(lhs, self.geometry.lhs_spec, self.crop)
        if relu:
            return forward_mode.call(autodiff.forward_relu, jvp.FORWARD_RELU, params, lhs, rhs, bias)
        return forward_mode.call(autodiff.forward, jvp.FORWARD, params, lhs, rhs, bias)


@dataclasses.dataclass(frozen=True)
class InputGradientCall(PassCall):
    """An input gradient, whose result is padded where the padding exceeds the window.

    Where the window of rhs is reversed, as in the input gradients that JAX writes, it is reversed again first, and XLA
    drops both reversals.
    """

    pad: Pairs
    rhs_is_reversed: bool = False

    pass_name: ClassVar[str] = "input_gradient"

    def compute(self, params: ConvParams, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        g = self.geometry
        w = lax.rev(rhs, g.rhs_spec[2:]) if self.rhs_is_reversed else rhs
        return pad_spatial(input_gradient_pass(params)(lhs, self._swapped(w)), g.lhs_spec, self.pad)

    def run(self, params: ConvParams, lhs: jax.Array, rhs: jax.Array, bias: jax.Array | None, relu: bool) -> jax.Array:
        """The differentiable call."""
        g = self.geometry
        if mesh := explicit_mesh(lhs, rhs):
            lhs, rhs = input_gradient_rule(params).reshard(mesh, (lhs, rhs))
        y = forward_mode.call(autodiff.input_gradient, jvp.INPUT_GRADIENT, params, lhs, self._swapped(rhs))
        return add_bias_and_relu(pad_spatial(y, g.lhs_spec, self.pad), bias, relu, g.lhs_spec)

    def _swapped(self, w: jax.Array) -> jax.Array:
        g = self.geometry
        return w if g.feature_group_count == 1 else swap_features(w, g.rhs_spec, g.feature_group_count)


@dataclasses.dataclass(frozen=True)
class WeightGradientCall(PassCall):
    """A weight gradient, after x is cropped where the padding is negative.

    Without input dilation lhs is x and rhs is dy. With input dilation, as in the weight gradient of a transposed
    convolution, lhs is dy, rhs is x and the result is reversed. Groups of lhs features are independent problems.
    """

    crop: Pairs
    lhs_is_dy: bool
    num_problems: int

    pass_name: ClassVar[str] = "weight_gradient"

    def problem(self, dtype: Any) -> ConvProblem:
        num_problems = (self.num_problems,) if self.num_problems > 1 else ()
        return ConvProblem(self.geometry, *self.sizes, dtype, num_problems)

    def compute(self, params: ConvParams, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        g = self.geometry
        params = dataclasses.replace(params, batched=self.num_problems > 1)
        dw, _ = weight_gradient_pass(params, False)(*self._operands(lhs, rhs))
        if self.num_problems > 1:
            return fold(dw, g.rhs_spec[int(self.lhs_is_dy)])  # into the output features of the call
        swaps_features = self.lhs_is_dy and g.feature_group_count > 1
        return swap_features(dw, g.rhs_spec, g.feature_group_count) if swaps_features else dw

    def _operands(self, lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x and dy, with an axis of independent problems first if there are several."""
        g = self.geometry
        x, dy = (rhs, lhs) if self.lhs_is_dy else (lhs, rhs)
        x = pad_spatial(x, g.lhs_spec, self.crop)
        if self.num_problems == 1:
            return x, dy
        # The groups of the call divide the features of lhs, here the batch, and the output features of rhs.
        of_x, of_dy = (g.lhs_spec[1], g.out_spec[0]) if self.lhs_is_dy else (g.lhs_spec[0], g.out_spec[1])
        return unfold(x, of_x, self.num_problems), unfold(dy, of_dy, self.num_problems)


def forward_call(a: ConvArguments) -> ForwardCall:
    """Reads a convolution without input dilation and batch groups as a forward pass."""
    crop, kept = _split_padding(a.padding)
    cropped = tuple(size + sum(pair) for size, pair in zip(a.lhs_spatial, crop, strict=True))
    lhs_spec, rhs_spec, out_spec = map(tuple, a.dimension_numbers)
    geometry = ConvGeometry(
        lhs_spec=lhs_spec,
        rhs_spec=rhs_spec,
        out_spec=out_spec,
        window_strides=a.window_strides,
        padding=kept,
        rhs_dilation=a.rhs_dilation,
        feature_group_count=a.feature_group_count,
        x_spatial=cropped,
        w_spatial=a.window,
        window_reversed=a.window_reversed,
    )
    return ForwardCall(geometry, (a.lhs_shape[lhs_spec[0]], a.lhs_shape[lhs_spec[1]], a.rhs_shape[rhs_spec[0]]), crop)


def input_gradient_call(a: ConvArguments, *, rhs_is_reversed: bool = False) -> InputGradientCall:
    """Reads a convolution with unit strides and without batch groups as the input gradient of another one.

    A convolution of a dilated lhs with a window of extent K and padding (a, b) is the transpose of the convolution with
    the dilation as its strides and padding (K - 1 - a, K - 1 - b), whose window is reversed and whose feature axes are
    swapped. The x of the other convolution is the result of this one, and its y is lhs.
    """
    (batch, feature, *_), (out, inn, *spatial), out_spec = a.dimension_numbers
    strides, extents = a.lhs_dilation, list(map(dilated_size, a.window, a.rhs_dilation))
    pads = [(k - 1 - low, k - 1 - high) for k, (low, high) in zip(extents, a.padding, strict=True)]
    unread = [unread_padding(*pair, stride) for pair, stride in zip(pads, strides, strict=True)]
    crop, kept = _split_padding(tuple((low, high + rest) for rest, (low, high) in zip(unread, pads, strict=True)))
    geometry = ConvGeometry(
        lhs_spec=tuple(out_spec),
        rhs_spec=(inn, out, *spatial) if a.feature_group_count == 1 else (out, inn, *spatial),
        out_spec=tuple(a.dimension_numbers.lhs_spec),
        window_strides=strides,
        padding=kept,
        rhs_dilation=a.rhs_dilation,
        feature_group_count=a.feature_group_count,
        x_spatial=tuple(
            (size - 1) * stride + extent - sum(pair) + rest
            for size, stride, extent, rest, pair in zip(a.lhs_spatial, strides, extents, unread, kept, strict=True)
        ),
        w_spatial=a.window,
        window_reversed=a.window_reversed == rhs_is_reversed,
    )
    pad = tuple((-low, -high) for low, high in crop)  # the other convolution crops its x, so the result here is padded
    sizes = a.lhs_shape[batch], a.rhs_shape[out], a.lhs_shape[feature]
    return InputGradientCall(geometry, sizes, pad, rhs_is_reversed)


def weight_gradient_call(a: ConvArguments) -> WeightGradientCall:
    """Reads a convolution without input dilation, or without window dilation, as a weight gradient.

    A weight gradient with strides S, window dilation R and padding (A, B) is

      dw[k] = sum_j x[j S + k R - A] dy[j].

    The result of a convolution of lhs (dilated by D) with rhs, with strides s, window dilation r and padding (a, b), is

      out[k] = sum_{p, j: j D = p r + k s - a} lhs[j] rhs[p].

    For D = 1 this is dw[k] with x = lhs, dy = rhs, S = r, R = s, A = a. For r = 1 it is dw[K - 1 - k], where K is the
    size of the result, with x = rhs, dy = lhs, S = D, R = s, A = (K - 1) s - a. B is what the sizes of x and dy leave.
    """
    lhs_is_dy = a.is_input_dilated
    (lhs_batch, lhs_feature, *lhs_spatial), (rhs_out, rhs_in, *rhs_spatial), (out_batch, out_feature, *out_spatial) = (
        a.dimension_numbers
    )
    x_sizes, dy_sizes = (a.window, a.lhs_spatial) if lhs_is_dy else (a.lhs_spatial, a.window)
    strides = a.lhs_dilation if lhs_is_dy else a.rhs_dilation
    pairs = []
    for x, dy, out, stride, dilation, (low, _) in zip(
        x_sizes, dy_sizes, a.out_spatial, strides, a.window_strides, a.padding, strict=True
    ):
        low = (out - 1) * dilation - low if lhs_is_dy else low
        high = (dy - 1) * stride + (out - 1) * dilation + 1 - x - low
        pairs.append((low, high + unread_padding(low, high, stride)))
    crop, kept = _split_padding(tuple(pairs))
    x_spec, dy_spec = (lhs_feature, lhs_batch, *lhs_spatial), (rhs_in, rhs_out, *rhs_spatial)
    grouped_swap = lhs_is_dy and a.batch_group_count > 1  # the result's features are swapped within each group
    if lhs_is_dy:
        x_spec, dy_spec = dy_spec, x_spec
    features_of_dw = (out_batch, out_feature) if lhs_is_dy and not grouped_swap else (out_feature, out_batch)
    geometry = ConvGeometry(
        lhs_spec=x_spec,
        rhs_spec=(*features_of_dw, *out_spatial),
        out_spec=dy_spec,
        window_strides=strides,
        padding=kept,
        rhs_dilation=a.window_strides,
        feature_group_count=a.batch_group_count,
        x_spatial=tuple(size + sum(pair) for size, pair in zip(x_sizes, crop, strict=True)),
        w_spatial=a.out_spatial,
        window_reversed=lhs_is_dy,
    )
    num_problems = a.feature_group_count
    batch, features = a.lhs_shape[lhs_feature] // num_problems, a.lhs_shape[lhs_batch]
    out_features = a.rhs_shape[rhs_out] // num_problems
    if lhs_is_dy:
        features, out_features = out_features, features
    return WeightGradientCall(geometry, (batch, features, out_features), crop, lhs_is_dy, num_problems)


def _split_padding(padding: Pairs) -> tuple[Pairs, Pairs]:
    """The negative and the positive part of a padding: what is cropped, and what is padded."""
    crop = tuple((min(0, low), min(0, high)) for low, high in padding)
    return crop, tuple((max(0, low), max(0, high)) for low, high in padding)
