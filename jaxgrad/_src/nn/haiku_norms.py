"""`GroupNorm`, `LayerNorm`, `InstanceNorm` and `RMSNorm` of Haiku, on the ops of jaxgrad."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from jaxgrad._src.nn.batch_norm import as_batch
from jaxgrad._src.nn.norms import Norm, find_norm


class GroupNorm(hk.GroupNorm):
    """`haiku.GroupNorm` on `jaxgrad.group_norm`.

    Constructor, parameters and results are those of `haiku.GroupNorm`: checkpoints fit both ways.

    A call with a `scale` or `offset`, complex numbers or ints, a negative `axis`, or reduced axes that with the
    channels are not the last ones runs Haiku's code.

    Examples:
      >>> import haiku as hk
      >>> from jaxgrad.nn import haiku
      >>> module = hk.without_apply_rng(hk.transform(lambda x: haiku.GroupNorm(4)(x)))
      >>> x = jnp.ones((8, 32, 32, 16))
      >>> module.apply(module.init(jax.random.key(0), x), x).shape
      (8, 32, 32, 16)
    """

    def __call__(self, x: jax.Array, scale: jax.Array | None = None, offset: jax.Array | None = None) -> jax.Array:
        """Normalizes x, as `haiku.GroupNorm`, which describes the arguments."""
        x = as_batch("jaxgrad.nn.haiku.GroupNorm", "x", x)
        axis: Any = self.axis
        norm = None
        # Haiku counts negative axes with one for the groups, and changes `axis` in its first call.
        if self.rank is None and x.ndim > 1 and (isinstance(axis, slice) or min(axis, default=-1) >= 0):
            norm = find_norm(x, axis, self.channel_index, num_groups=self.groups)
        shape = (x.shape[self.channel_index], *[1] * (0 if self.channel_index == -1 else x.ndim - 2))
        return _run(self, super().__call__, x, (scale, offset), norm, shape)


class _LayerNorm(hk.LayerNorm):
    def __call__(self, inputs: jax.Array, scale: jax.Array | None = None, offset: jax.Array | None = None) -> jax.Array:
        """Normalizes the inputs, as the layer of Haiku of this name, which describes the arguments."""
        inputs = as_batch(f"jaxgrad.nn.haiku.{type(self).__name__}", "inputs", inputs)
        norm = find_norm(inputs, self.axis, self.param_axis)
        return _run(self, super().__call__, inputs, (scale, offset), norm, _shape(inputs, norm))


class LayerNorm(_LayerNorm):
    """`haiku.LayerNorm` on `jaxgrad.layer_norm` and `jaxgrad.group_norm`.

    Constructor, parameters and results are those of `haiku.LayerNorm`: checkpoints fit both ways. The variance is
    always computed from deviations; `use_fast_variance` has no effect.

    A call with a `scale` or `offset`, complex numbers or ints, or with `axis` and `param_axis` that are not together
    the last ones runs Haiku's code. So does one with several parameter axes of which only some are reduced, or which
    are not neighbors and not reduced.

    Examples:
      >>> import haiku as hk
      >>> from jaxgrad.nn import haiku
      >>> module = hk.without_apply_rng(hk.transform(lambda x: haiku.LayerNorm(-1, True, True)(x)))
      >>> x = jnp.ones((8, 128, 64))
      >>> module.apply(module.init(jax.random.key(0), x), x).shape
      (8, 128, 64)
    """


class InstanceNorm(_LayerNorm, hk.InstanceNorm):
    """`haiku.InstanceNorm` on `jaxgrad.group_norm`.

    Constructor, parameters and results are those of `haiku.InstanceNorm`: checkpoints fit both ways.

    A call with a `scale` or `offset`, or with complex numbers or ints runs Haiku's code.

    Examples:
      >>> import haiku as hk
      >>> from jaxgrad.nn import haiku
      >>> module = hk.without_apply_rng(hk.transform(lambda x: haiku.InstanceNorm(True, True)(x)))
      >>> x = jnp.ones((8, 32, 32, 16))
      >>> module.apply(module.init(jax.random.key(0), x), x).shape
      (8, 32, 32, 16)
    """


class RMSNorm(hk.RMSNorm):
    """`haiku.RMSNorm` on `jaxgrad.rms_norm`.

    Constructor, parameters and results are those of `haiku.RMSNorm`: checkpoints fit both ways.

    A call with complex numbers or ints, with an `axis` that is not the last axes, or with a `param_axis` that is not
    among them runs Haiku's code.

    Examples:
      >>> import haiku as hk
      >>> from jaxgrad.nn import haiku
      >>> module = hk.without_apply_rng(hk.transform(lambda x: haiku.RMSNorm(-1)(x)))
      >>> x = jnp.ones((8, 128, 64))
      >>> module.apply(module.init(jax.random.key(0), x), x).shape
      (8, 128, 64)
    """

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Normalizes the inputs, as `haiku.RMSNorm`."""
        inputs = as_batch("jaxgrad.nn.haiku.RMSNorm", "inputs", inputs)
        norm = find_norm(inputs, self.axis, self.param_axis, centered=False)
        return _run(self, super().__call__, inputs, (), norm, _shape(inputs, norm))


def _shape(inputs: jax.Array, norm: Norm | None) -> tuple[int, ...]:
    """The shape of the parameters of `haiku.LayerNorm`: that of the last axis alone has no other axes."""
    axes = (-1,) if norm is None else norm.feature_axes
    first = -1 if axes == (-1,) else -inputs.ndim
    return tuple(inputs.shape[axis] if axis in axes else 1 for axis in range(first, 0))


def _run(
    module: Any,
    own: Callable[..., Any],
    x: jax.Array,
    given: tuple[jax.Array | None, ...],
    norm: Norm | None,
    shape: Sequence[int],
) -> Any:
    """The result of a module. `own` is Haiku's code; `given` are a scale and an offset of the call."""
    if norm is None or any(array is not None for array in given):
        return own(x, *given)
    scale = offset = None
    if module.create_scale:
        scale = hk.get_parameter("scale", shape, x.dtype, module.scale_init)
    if getattr(module, "create_offset", False):  # RMSNorm has none
        offset = hk.get_parameter("offset", shape, x.dtype, module.offset_init)
    dtype = jnp.result_type(x, *(a for a in (scale, offset) if a is not None))
    return norm(x, scale, offset, dtype=dtype, epsilon=module.eps)
