"""The public function: checks of its arguments, and which axes change by a whole factor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax import export, lax
from jax.image import ResizeMethod

from jaxgrad._src.core import checks
from jaxgrad._src.resize.rules import apply, whole_factor_rule

_OP = "jaxgrad.resize"

Sizes = tuple[Any, ...]  # ints, or symbolic dimensions of `jax.export`


def resize(
    image: jax.typing.ArrayLike,
    shape: Sequence[int],
    method: str | ResizeMethod,
    antialias: bool = True,
    precision: Any = lax.Precision.HIGHEST,
) -> jax.Array:
    """Resizes an image, with the arguments and results of `jax.image.resize` and a faster gradient.

    Axes that grow or shrink by a whole factor are computed by nearest-neighbour and linear interpolation without
    matrix products, gathers and scatters. `jax.image.resize` computes the other methods, other changes of size, and
    linear
    interpolation by factors above 8.

    Args:
      image: an array of any rank. Linear interpolation and the other methods convert ints and bools to floats.
      shape: the size of each axis of the result. Axes of the batch and of the channels keep the size that they have.
      method: "nearest"; "linear", "bilinear", "trilinear" or "triangle", which are the same for any number of axes;
        or another method of `jax.image.resize`, as a string or a `jax.image.ResizeMethod`.
      antialias: whether an axis that shrinks is smoothed: linear interpolation by a factor f weights 2 f elements
        (2 f - 1 if f is odd). Without it, a result is the mean of two elements, or one element if f is odd. "nearest"
        ignores it.
      precision: of the products in `jax.image.resize`. Axes that change by whole factors have none.

    Returns:
      The resized image, of the dtype that `jax.image.resize` returns: that of `image`, or a floating-point one.

    Raises:
      TypeError: if `image` is not an array of numbers, or keys, which only "nearest" resizes; shape is not a sequence
        of ints; method is neither a string nor a ResizeMethod; or antialias is not a bool.
      ValueError: if shape does not have an element for each axis of `image`, or a negative one; or method is unknown.

    Notes:
      Weighted sums of 16-bit images, and the sums of their gradients, are computed in float32 and rounded once.
      `jax.image.resize` rounds after each axis.

      An infinity or NaN reaches only the results that have a weight for it, and an infinity stays one. Linear
      interpolation of `jax.image.resize` multiplies all elements of an axis, most of them by zero, and makes each
      result along the axis NaN.

      All of JAX's transformations apply, forward mode to any order too. A mesh may split the axes that keep their size.

    Examples:
      >>> x = jax.random.normal(jax.random.key(0), (8, 16, 16, 64))
      >>> jaxgrad.resize(x, (8, 32, 32, 64), "nearest").shape
      (8, 32, 32, 64)
      >>> print(jaxgrad.resize(jnp.arange(3.0), (6,), "linear"))
      [0.   0.25 0.75 1.25 1.75 2.  ]
    """
    x = checks.as_array(_OP, "image", image)
    sizes = _check_shape(shape, x)
    method = _check_method(method)
    if checks.is_key(x) and method != ResizeMethod.NEAREST:
        raise TypeError(f"{_OP}: image must be an array of numbers for {method}, got {x.dtype.name}")
    return _resize(x, sizes, method, checks.check_flag(_OP, "antialias", antialias), precision)


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _resize(x: jax.Array, shape: Sizes, method: ResizeMethod, antialias: bool, precision: Any) -> jax.Array:
    rules = {
        axis: rule
        for axis, (old, new) in enumerate(zip(x.shape, shape, strict=True))
        if (rule := whole_factor_rule(old, new, method, antialias))
    }
    others = tuple(x.shape[axis] if axis in rules else new for axis, new in enumerate(shape))
    x = jax.image.resize(x, others, method, antialias, precision)  # also converts ints where needed
    return apply(rules, x) if rules else x


def _check_shape(shape: Any, x: jax.Array) -> Sizes:
    """Returns the sizes, each an int or a symbolic dimension of `jax.export`."""
    symbolic = [export.is_symbolic_dim(size) for size in shape] if isinstance(shape, Sequence) else []
    if any(symbolic):
        known = checks.as_ints(_OP, "shape", [0 if each else size for each, size in zip(symbolic, shape, strict=True)])
        sizes = tuple(old if each else new for each, old, new in zip(symbolic, shape, known, strict=True))
    else:
        sizes = known = checks.as_ints(_OP, "shape", shape)
    if len(sizes) != x.ndim:
        raise ValueError(f"{_OP}: shape must have {x.ndim} elements, one for each axis of image {x.shape}, got {sizes}")
    if min(known, default=0) < 0:
        raise ValueError(f"{_OP}: no element of shape may be negative, got {sizes}")
    return sizes


def _check_method(method: Any) -> ResizeMethod:
    if isinstance(method, ResizeMethod):
        return method
    if not isinstance(method, str):
        raise TypeError(f"{_OP}: method must be a string or a jax.image.ResizeMethod, got {type(method).__name__}")
    try:
        return ResizeMethod.from_string(method)
    except ValueError as error:
        names = ", ".join(repr(each.name.lower().replace("_", "-")) for each in ResizeMethod)
        raise ValueError(f"{_OP}: method must be one of {names} or their synonyms, got {method!r}") from error
