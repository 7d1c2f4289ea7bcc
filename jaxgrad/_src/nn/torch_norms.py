"""`GroupNorm`, `InstanceNorm`, `LayerNorm` and `RMSNorm` as in `torch.nn`, for programs without a framework."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrad._src.convert.batch_norm_weights import as_epsilon
from jaxgrad._src.convert.norm_weights import Kind, NormWeights
from jaxgrad._src.convert.records import check_record
from jaxgrad._src.convert.torch_norm import default_rms_epsilon
from jaxgrad._src.core import checks
from jaxgrad._src.core.activations import Activation


class _Norm:
    """A layer as a pytree of the arrays of its record.

    `shape` is that of scale and bias, whether there are any, or None for weights from elsewhere that have none.
    """

    kind: ClassVar[Kind]
    weights: NormWeights
    shape: tuple[int, ...] | None

    def _set(
        self, shape: tuple[int, ...], has_scale: bool, has_bias: bool, dtype: Any, eps: float | None, **settings: Any
    ) -> None:
        """The arrays of PyTorch's initialization: ones and zeros."""
        try:
            zero = jnp.zeros((), dtype)
        except TypeError as error:
            raise TypeError(f"{self._name()}: dtype must be a dtype, got {dtype!r}") from error
        checks.check_floating(self._name(), "dtype", zero)
        dtype = zero.dtype
        epsilon = as_epsilon(self._name(), "eps", default_rms_epsilon(dtype) if eps is None else eps)
        scale = jnp.ones(shape, dtype) if has_scale else None
        bias = jnp.zeros(shape, dtype) if has_bias else None
        self.weights = NormWeights(scale, bias, kind=self.kind, epsilon=epsilon, **settings)
        self.shape = shape

    @classmethod
    def _name(cls) -> str:
        return f"jaxgrad.nn.{cls.__name__}"

    @classmethod
    def from_weights(cls, weights: NormWeights) -> Self:
        """The layer with given weights, such as `jaxgrad.convert.torch.read_norm` returns.

        Raises:
          TypeError: weights are not `NormWeights`.
          ValueError: they are those of another kind of layer, or the axes are not PyTorch's.
        """
        check_record(cls._name(), weights, NormWeights)
        if weights.kind != cls.kind:
            raise ValueError(f'{cls._name()}: weights must be of the kind "{cls.kind}", got "{weights.kind}"')
        axes = (weights.axis,) if isinstance(weights.axis, int) else tuple(weights.axis)
        axis, described = cls._axis(len(axes))
        if axes != (axis if isinstance(axis, tuple) else (axis,)):
            raise ValueError(f"{cls._name()}: the axis of weights must be {described}, got {weights.axis}")
        norm = object.__new__(cls)
        norm.weights = dataclasses.replace(weights, axis=axis)
        arrays = (a for a in (weights.scale, weights.bias) if a is not None)
        norm.shape = next((a.shape[-len(axes) :] for a in arrays), None)
        return norm

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        return ((jax.tree_util.GetAttrKey("weights"), self.weights),), self.shape

    @classmethod
    def tree_unflatten(cls, shape: tuple[int, ...] | None, children: tuple[Any]) -> Self:
        norm = object.__new__(cls)
        (norm.weights,), norm.shape = children, shape
        return norm

    def __call__(
        self,
        x: jax.typing.ArrayLike,
        *,
        residual: jax.typing.ArrayLike | None = None,
        activation: Activation = None,
        implementation: str | None = None,
    ) -> jax.Array:
        """Normalizes x. The other arguments, which PyTorch does not have, and the errors are those of the op.

        Scale and bias are cast to the dtype of x, of a 16-bit x to float32.
        """
        x = checks.as_array(self._name(), "x", x)
        checks.check_floating(self._name(), "x", x)
        self._check(x.shape)
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        scale, bias = (None if a is None else a.astype(dtype) for a in (self.weights.scale, self.weights.bias))
        weights = dataclasses.replace(self.weights, scale=scale, bias=bias)
        with jax.named_scope(self._name()):
            return weights(x, residual=residual, activation=activation, implementation=implementation)

    @classmethod
    def _axis(cls, rank: int) -> tuple[int | tuple[int, ...], str]:
        """The axis in a record whose arrays have this rank, and what it is called in an error."""
        raise NotImplementedError

    def _check(self, shape: tuple[int, ...]) -> None:
        """Checks the shape of x."""
        raise NotImplementedError


class _OfChannels(_Norm):
    """Scale and bias have an element for each channel, in axis 1."""

    min_rank: ClassVar[int]

    @classmethod
    def _axis(cls, rank: int) -> tuple[int, str]:
        return 1, "1"

    def _check(self, shape: tuple[int, ...]) -> None:
        if len(shape) < self.min_rank:
            raise ValueError(f"{self._name()}: x must have rank {self.min_rank} or more, got the shape {shape}")
        if self.shape is not None and (shape[1],) != self.shape:
            raise ValueError(f"{self._name()}: x must have {self.shape[0]} channels in axis 1, got the shape {shape}")


class _OfLastAxes(_Norm):
    """Scale and bias have the sizes of the last axes."""

    def _set_over(self, sizes: Any, has_scale: bool, has_bias: bool, dtype: Any, eps: float | None) -> None:
        name = self._name()
        is_one = isinstance(sizes, (int, np.integer))
        given = (sizes,) if is_one else checks.as_ints(name, "normalized_shape", sizes)
        if not given:
            raise ValueError(f"{name}: normalized_shape must have a size, got {sizes}")
        shape = tuple(checks.as_size(name, "normalized_shape", size) for size in given)
        self._set(shape, has_scale, has_bias, dtype, eps, axis=self._axis(len(shape))[0])

    @classmethod
    def _axis(cls, rank: int) -> tuple[tuple[int, ...], str]:
        return tuple(range(-rank, 0)), "the last axes"

    def _check(self, shape: tuple[int, ...]) -> None:
        own = self.shape
        if own is not None and shape[-len(own) :] != own:
            raise ValueError(f"{self._name()}: the last axes of x must be normalized_shape, {own}, got {shape}")


@jax.tree_util.register_pytree_with_keys_class
class GroupNorm(_OfChannels):
    """`torch.nn.GroupNorm` on `jaxgrad.group_norm`.

    The arguments have PyTorch's names and meanings, and with the same weights the results are PyTorch's. The layer is a
    pytree of arrays, so that `jax.grad`, `jax.jit` and optax take it as it is.

    Args:
      num_groups: the number of groups, which divides C.
      num_channels: C. x has the shape [N, C, ...].
      eps: added to the variance.
      affine: whether there are a scale and a bias.
      dtype: of scale and bias.

    Attributes:
      weights: a `jaxgrad.convert.NormWeights`.
      shape: that of scale and bias, also of a layer without them; None if the weights came without.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: a size is not positive, num_groups does not divide num_channels, or eps is negative or not finite.

    Examples:
      >>> from jaxgrad import nn
      >>> norm = nn.GroupNorm(4, 16)
      >>> norm(jnp.ones((8, 16, 32, 32)), activation="silu").shape
      (8, 16, 32, 32)
    """

    kind = "group"
    min_rank = 2

    def __init__(
        self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True, *, dtype: Any = jnp.float32
    ) -> None:
        groups = checks.as_size(self._name(), "num_groups", num_groups)
        channels = checks.as_size(self._name(), "num_channels", num_channels)
        if channels % groups:
            raise ValueError(f"{self._name()}: num_groups must divide num_channels, {channels}, got {groups}")
        affine = checks.check_flag(self._name(), "affine", affine)
        self._set((channels,), affine, affine, dtype, eps, num_groups=groups, axis=1)


@jax.tree_util.register_pytree_with_keys_class
class InstanceNorm(_OfChannels):
    """`torch.nn.InstanceNorm1d`, `InstanceNorm2d` and `InstanceNorm3d` on `jaxgrad.group_norm`.

    The arguments have PyTorch's names and meanings, and with the same weights the results are PyTorch's. There are no
    running statistics, which are off by default in PyTorch too, and x is a batch: map a single example with `jax.vmap`
    or give it a first axis. The layer is a pytree of arrays.

    Args:
      num_features: C. x has the shape [N, C, ...], with one spatial axis or more.
      eps: added to the variance.
      affine: whether there are a scale and a bias.
      dtype: of scale and bias.

    Attributes:
      weights: a `jaxgrad.convert.NormWeights`.
      shape: that of scale and bias, also of a layer without them; None if the weights came without.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: num_features is not positive, or eps is negative or not finite.

    Examples:
      >>> from jaxgrad import nn
      >>> nn.InstanceNorm(16)(jnp.ones((8, 16, 32, 32))).shape
      (8, 16, 32, 32)
    """

    kind = "instance"
    min_rank = 3

    def __init__(self, num_features: int, eps: float = 1e-5, *, affine: bool = False, dtype: Any = jnp.float32) -> None:
        shape = (checks.as_size(self._name(), "num_features", num_features),)
        affine = checks.check_flag(self._name(), "affine", affine)
        self._set(shape, affine, affine, dtype, eps, axis=1)


@jax.tree_util.register_pytree_with_keys_class
class LayerNorm(_OfLastAxes):
    """`torch.nn.LayerNorm` on `jaxgrad.layer_norm`.

    The arguments have PyTorch's names and meanings, and with the same weights the results are PyTorch's. The layer is a
    pytree of arrays.

    Args:
      normalized_shape: the sizes of the last axes of x, over which the statistics are taken; an int for one axis.
      eps: added to the variance.
      elementwise_affine: whether there are a scale and, with `bias`, a bias, of the shape normalized_shape.
      bias: as above.
      dtype: of scale and bias.

    Attributes:
      weights: a `jaxgrad.convert.NormWeights`.
      shape: that of scale and bias, also of a layer without them; None if the weights came without.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: a size is not positive, there is none, or eps is negative or not finite.

    Examples:
      >>> from jaxgrad import nn
      >>> nn.LayerNorm(64)(jnp.ones((8, 10, 64))).shape
      (8, 10, 64)
    """

    kind = "layer"

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        dtype: Any = jnp.float32,
    ) -> None:
        affine = checks.check_flag(self._name(), "elementwise_affine", elementwise_affine)
        bias = checks.check_flag(self._name(), "bias", bias)
        self._set_over(normalized_shape, affine, affine and bias, dtype, eps)


@jax.tree_util.register_pytree_with_keys_class
class RMSNorm(_OfLastAxes):
    """`torch.nn.RMSNorm` on `jaxgrad.rms_norm`.

    The arguments have PyTorch's names and meanings, and with the same weights the results are PyTorch's. The layer is a
    pytree of arrays.

    Args:
      normalized_shape: the sizes of the last axes of x, over which the squares are averaged; an int for one axis.
      eps: added to the mean of the squares; None for the machine epsilon of float64 if dtype is float64, otherwise of
        float32. PyTorch has that of the dtype in which it computes, which is the same if x has this dtype.
      elementwise_affine: whether there is a scale, of the shape normalized_shape.
      dtype: of the scale.

    Attributes:
      weights: a `jaxgrad.convert.NormWeights`.
      shape: that of scale and bias, also of a layer without them; None if the weights came without.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: a size is not positive, there is none, or eps is negative or not finite.

    Examples:
      >>> from jaxgrad import nn
      >>> nn.RMSNorm(64)(jnp.ones((8, 10, 64))).shape
      (8, 10, 64)
    """

    kind = "rms"

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        *,
        dtype: Any = jnp.float32,
    ) -> None:
        affine = checks.check_flag(self._name(), "elementwise_affine", elementwise_affine)
        self._set_over(normalized_shape, affine, False, dtype, eps)
