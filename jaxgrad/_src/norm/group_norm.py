"""The public op `group_norm`."""

from __future__ import annotations

import jax

from jaxgrad._src.choice.op import Op
from jaxgrad._src.core import checks
from jaxgrad._src.core.activations import Activation, activation_name
from jaxgrad._src.norm import calls
from jaxgrad._src.norm.arguments import (
    ACTIVATIONS,
    check_axis,
    check_epsilon,
    check_parameters,
    check_residual,
    check_x,
)
from jaxgrad._src.norm.backend import PASSES
from jaxgrad._src.norm.backends import TWO_STEP_BACKENDS

GROUP_NORM = Op("group_norm", PASSES, TWO_STEP_BACKENDS)

_NAME = "jaxgrad.group_norm"


@GROUP_NORM.public
def group_norm(
    x: jax.typing.ArrayLike,
    scale: jax.typing.ArrayLike | None,
    bias: jax.typing.ArrayLike | None,
    *,
    num_groups: int,
    feature_axis: int = -1,
    epsilon: float = 1e-5,
    residual: jax.typing.ArrayLike | None = None,
    activation: Activation = None,
    implementation: str | None = None,
) -> jax.Array:
    """Group normalization: each group of neighboring channels of each example has its own mean and variance.

    Computes, with the mean and the biased variance over the channels of a group and over all axes but the first,

        y = act(scale * (x - mean) / sqrt(var + epsilon) + bias + residual)

    C is the number of channels, `x.shape[feature_axis]`. With `num_groups=C` the op is instance normalization.

    Args:
      x: the batch, whose first axis is that of the examples, of rank 2 or more: float32, float64, bfloat16 or float16.
        For the 16-bit dtypes, statistics and arithmetic are float32.
      scale: [C], of the dtype of x, or float32 if x is 16-bit; None for ones.
      bias: [C], of the dtype of scale; None for zeros.
      num_groups: the number of groups, which divides C.
      feature_axis: the axis of the channels, not the first axis. Negative values count from the end.
      epsilon: a non-negative Python number that is added to the variance. PyTorch and ONNX have 1e-5 too, flax 1e-6.
      residual: an array of the shape and dtype of x that is added before the activation; None for no residual.
      activation: "relu", "silu" or "gelu", or the function of `jax.nn` of that name; None for no activation. The
        gradient of relu at zero is zero, and gelu is the approximation by tanh, as in `jax.nn`.
      implementation: "cpu" for the C++ kernels, "cuda" for jaxgrad's CUDA kernels, "xla" for XLA, None for the fastest
        available. An implementation that is given runs or raises. `jaxgrad.explain` reports what None selects.

    Returns:
      y, of the shape and dtype of x.

    Raises:
      TypeError: an array has an unsupported dtype, or num_groups, feature_axis or epsilon has the wrong type.
      ValueError: the shape of an array does not fit, num_groups does not divide C, feature_axis is out of range,
        epsilon is negative or not finite, or activation or implementation is unknown; or a forced implementation does
        not support the call, or is lowered for another platform.
      RuntimeError: a forced implementation cannot be loaded.

    Notes:
      Accuracy. The variance is computed from deviations, so it stays accurate where the mean is much larger than the
      standard deviation, unlike E[x^2] - E[x]^2.

      Differentiation. Reverse mode works to any order: the first derivative uses the kernels, higher derivatives run on
      XLA. The residuals are those of `jaxgrad.batch_norm_training`. Forward mode requires `jaxgrad.forward_mode`.

      Several devices. A mesh may split the examples without communication, and the other axes with sums of statistics.
      Where a kernel runs, split channels are gathered.

      The formulas are those of Wu and He, "Group Normalization" (2018).

    Examples:
      >>> x = jax.random.normal(jax.random.key(0), (8, 32, 32, 16))
      >>> jaxgrad.group_norm(x, jnp.ones(16), jnp.zeros(16), num_groups=4, activation="silu").shape
      (8, 32, 32, 16)
    """
    activation = activation_name(_NAME, activation, ACTIVATIONS)
    GROUP_NORM.check_implementation(implementation)
    epsilon = check_epsilon(_NAME, epsilon)
    x = check_x(_NAME, x, smallest_rank=2)
    feature_axis = check_axis(_NAME, "feature_axis", feature_axis, x)
    if feature_axis == 0:
        raise ValueError(f"{_NAME}: feature_axis must not be the first axis of x, that of the examples, got 0")
    channels = x.shape[feature_axis]
    num_groups = checks.as_int(_NAME, "num_groups", num_groups)
    if num_groups < 1 or channels % num_groups:
        raise ValueError(
            f"{_NAME}: num_groups must divide C = {channels}, the size of the feature axis, got {num_groups}"
        )
    scale, bias = check_parameters(_NAME, scale, bias, ("C",), (channels,), x)
    y, _, _ = calls.by_own_statistics(
        GROUP_NORM,
        implementation,
        x,
        scale,
        bias,
        check_residual(_NAME, residual, x),
        feature_axis=feature_axis,
        sample_axes=1,
        num_groups=num_groups,
        epsilon=epsilon,
        activation=activation,
    )
    return y
