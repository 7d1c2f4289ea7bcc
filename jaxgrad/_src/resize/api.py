"""The public function: checks of its arguments, and which axes change by a whole factor."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
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

    "nearest" and "linear" change the size of an axis by a whole factor with copies and sums of slices. Their gradients
    have no scatters and no matrix products. `jax.image.resize` computes all else: the other methods, factors that are
    not whole, and linear interpolation by factors above 8.

    Args:
      image: an array of any rank and dtype. All methods but "nearest" convert ints and bools to floats.
      shape: the size of each axis of the result. An axis of the batch or of the channels keeps its size.
      method: "nearest"; "linear", or its synonyms "bilinear", "trilinear" and "triangle"; another method of
        `jax.image.resize`; or a `jax.image.ResizeMethod`.
      antialias: whether a triangle twice as wide as the factor smooths an axis that shrinks. Without it, "linear"
        returns the mean of the two central elements of each block, or the central one if the factor is odd. "nearest"
        ignores it.
      precision: the precision of the matrix products of `jax.image.resize`.

    Returns:
      The resized image, of the dtype that `jax.image.resize` returns: that of `image`, or a floating-point one.

    Raises:
      TypeError: if image is not an array, or an array of keys and method not "nearest"; shape is not a sequence of
        ints; method is neither a string nor a ResizeMethod; or antialias is not a bool.
      ValueError: if shape does not have an element for each axis of `image`, or has a negative one; or method is not
        known.

    Notes:
      Sums of 16-bit images and gradients are computed in float32 and rounded once. `jax.image.resize` also rounds the
      weights, and the result of each axis.

      "nearest" computes indices exactly. `jax.image.resize` computes them in float32, which along axes of thousands of
      elements gives a neighbour in places.

      An infinity or NaN of `image` reaches the results that have a weight for it. With "linear", `jax.image.resize`
      also multiplies it by zero, so that all results along the axis are NaN.

      All transformations of JAX work: reverse and forward mode to any order, `vmap`, and `jax.export`, also with
      symbolic sizes. A mesh may split the axes that keep their size.

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
    if not isinstance(precision, Hashable):
        expected = "None, a string, a jax.lax.Precision or a pair of them"
        raise TypeError(f"{_OP}: precision must be {expected}, got {type(precision).__name__}")
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
    return apply(rules, x, method) if rules else x


def _check_shape(shape: Any, x: jax.Array) -> Sizes:
    is_symbolic = isinstance(shape, Sequence) and any(map(export.is_symbolic_dim, shape))
    known = [size for size in shape if not export.is_symbolic_dim(size)] if is_symbolic else shape
    known = checks.as_ints(_OP, "shape", known)
    sizes = tuple(shape) if is_symbolic else known
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
