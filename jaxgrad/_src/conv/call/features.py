"""The features of a convolution that the tables of preferences know (choice/table.py)."""

from __future__ import annotations

import math

from jaxgrad._src.conv.call.geometry import dilated_size
from jaxgrad._src.conv.call.kernel_layouts import kernel_layouts, xla_moves_features_last
from jaxgrad._src.conv.call.problem import ConvProblem
from jaxgrad._src.conv.call.weight_transpose import kernel_transposes

_TENSOR_CORE = 8  # 2-byte features that tensor-core kernels take at a time; cuDNN pads other counts


class ConvFeatures:
    """The features of a convolution.

    Attributes:
      dtype, bits: the dtype of the operands, and its size.
      axes: the number of spatial axes.
      window: the elements of the window.
      span: the positions from the first element of the window to the last, dilation included.
      weights: the elements of w.
      features, out_features: their numbers.
      groups: their number.
      features_of_group: the number of input features of a group.
      multiplications: of one pass of one problem.
      positions: the positions of the result, with those of the batch.
      problems: the number of independent problems that `vmap` makes; 0 for a call without it.
      channels_last: whether the features are the last axis of x and y, and the batch is the first; on a GPU also where
        XLA lays them out so (`xla_moves_features_last`).
      grouped, depthwise: whether there are groups, and each has one input and one output feature.
      several: whether a group has several input features.
      strided, dilated: whether a window stride or the dilation of the window is above 1.
      asymmetric: whether the padding differs between the two sides of an axis.
      disjoint: whether windows do not overlap, if they are not dilated.
      patches: whether windows have several elements and do not overlap, dilation included, so that XLA may run a matrix
        product.
      covers_x: whether the window covers all of x, so that the result is a matrix product.
      aligned: whether the input features of a group and all output features are multiples of 8.
      odd: whether the number of output features is odd.
      reversed: whether the window is reversed, as in `jax.lax.conv_transpose`. XLA does not recognize the convolution.
      relu: whether a kernel of the forward pass may apply relu.
    """

    def __init__(self, problem: ConvProblem, platform: str, *, relu: bool = False) -> None:
        g = problem.geometry
        last = len(g.lhs_spec) - 1
        self.dtype, self.bits = problem.dtype.name, 8 * problem.dtype.itemsize
        self.axes = len(g.w_spatial)
        self.window, self.weights = math.prod(g.w_spatial), math.prod(problem.w_shape)
        self.features, self.out_features = problem.features, problem.out_features
        self.multiplications = problem.multiplications
        self.positions = problem.batch * math.prod(g.y_spatial)
        self.problems = math.prod(problem.num_problems) if problem.num_problems else 0
        as_given = g.lhs_spec[1] == g.out_spec[1] == last and g.lhs_spec[0] == g.out_spec[0] == 0
        self.channels_last = as_given or (platform == "cuda" and xla_moves_features_last(problem))
        self.groups = g.feature_group_count
        self.grouped, self.depthwise = g.feature_group_count > 1, problem.is_depthwise
        self.several = problem.features != g.feature_group_count
        self.strided, self.dilated = max(g.window_strides) > 1, max(g.rhs_dilation) > 1
        self.asymmetric = any(low != high for low, high in g.padding)
        self.disjoint = all(k <= stride for k, stride in zip(g.w_spatial, g.window_strides, strict=True))
        self.patches = g.has_disjoint_windows
        self.covers_x = g.is_matrix_product
        self.features_of_group = problem.features // g.feature_group_count
        self.aligned = self.features_of_group % _TENSOR_CORE == 0 and problem.out_features % _TENSOR_CORE == 0
        self.odd = problem.out_features % 2 == 1
        self.reversed = g.window_reversed
        self.relu = relu
        self._problem = problem

    @property
    def span(self) -> int:
        g = self._problem.geometry
        return math.prod(dilated_size(*sizes) for sizes in zip(g.w_spatial, g.rhs_dilation, strict=True))

    @property
    def transposes_weights(self) -> bool:
        """Whether jaxgrad's kernel transposes the weight gradient from the layout that cuDNN writes.

        It compiles the kernel, so a row asks for it last.
        """
        return kernel_transposes(self._problem, kernel_layouts(self._problem)[0])
