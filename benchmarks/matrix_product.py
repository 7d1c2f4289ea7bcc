"""The bare matrix product of a convolution whose windows do not overlap, such as a patch embedding.

Each pass of such a convolution multiplies two matrices. The operands are rearranged before the timing and the result
after it, so that the product alone is timed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax import lax

if TYPE_CHECKING:
    from benchmarks.conv_cases import Case


class Product(NamedTuple):
    """One pass.

    Attributes:
      function: the product of two matrices, with groups one product for each group.
      operands: the matrices.
      restored: rearranges the result into that of the convolution.
    """

    function: Callable[[jax.Array, jax.Array], jax.Array]
    operands: tuple[jax.Array, jax.Array]
    restored: Callable[[np.ndarray], np.ndarray]


def has_product(case: Case) -> bool:
    """Whether the passes are matrix products that are worth timing.

    Windows have several elements and do not overlap, and every element of x and y is in a window. Groups have several
    input features: a depthwise pass is no matrix product worth timing.
    """
    return (
        case.stride == case.window > 1
        and (case.dilation, case.padding, case.causal) == (1, 0, False)
        and (case.transposed or not any(size % case.window for size in case.spatial))
        and (case.groups == 1 or case.features > case.groups)
    )


def products(case: Case, x: jax.Array, w: jax.Array, dy: jax.Array) -> dict[str, Product]:
    """ "forward", "dX" and "dW" of a case that `has_product`.

    The matrices have these axes; with groups, the first axis is an axis of groups. A convolution reads patches and
    writes vectors; a transposed convolution reads vectors and writes patches.
      patches: positions, elements of a patch.
      weights: elements of a patch, features of a vector.
      vectors: positions, features of a vector.
    """
    patches, weights, vectors = _arrangements(case)
    x_as, y_as = (vectors, patches) if case.transposed else (patches, vectors)
    x, w, dy = x_as.arranged(x), weights.arranged(w), y_as.arranged(dy)
    to_vectors, to_patches = (partial(_product, axes, case.groups > 1) for axes in ((1, 0), (1, 1)))
    forward, backward = (to_patches, to_vectors) if case.transposed else (to_vectors, to_patches)
    of_dw = (dy, x) if case.transposed else (x, dy)
    return {
        "forward": Product(forward, (x, w), y_as.restored),
        "dX": Product(backward, (dy, w), x_as.restored),
        "dW": Product(partial(_product, (0, 0), case.groups > 1), of_dw, weights.restored),
    }


def _product(axes: tuple[int, int], has_groups: bool, a: jax.Array, b: jax.Array) -> jax.Array:
    """The sum over an axis of a and an axis of b, at JAX's default precision, in the dtype of a and b."""
    groups = ((0,), (0,)) if has_groups else ((), ())
    return lax.dot_general(a, b, (tuple((axis + has_groups,) for axis in axes), groups))


@dataclasses.dataclass(frozen=True)
class _Arrangement:
    """How an array of the convolution becomes a matrix.

    Attributes:
      sizes: the sizes of the named axes.
      array: the names that each axis of the array consists of.
      matrix: the names that each axis of the matrix consists of.
      reversed_axes: axes of the array whose order is reversed.
    """

    sizes: Mapping[str, int]
    array: Sequence[Sequence[str]]
    matrix: Sequence[Sequence[str]]
    reversed_axes: frozenset[int] = frozenset()

    def arranged(self, array: Any) -> Any:
        return self._moved(self._in_order(array), self.array, self.matrix)

    def restored(self, matrix: Any) -> Any:
        return self._in_order(self._moved(matrix, self.matrix, self.array))

    def _in_order(self, array: Any) -> Any:
        return array[tuple(slice(None, None, -1 if i in self.reversed_axes else 1) for i in range(array.ndim))]

    def _moved(self, array: Any, old: Sequence[Sequence[str]], new: Sequence[Sequence[str]]) -> Any:
        names = list(chain(*old))
        apart = array.reshape([self.sizes[name] for name in names]).transpose([names.index(n) for n in chain(*new)])
        return apart.reshape([math.prod(self.sizes[name] for name in axis) for axis in new])


def _arrangements(case: Case) -> tuple[_Arrangement, _Arrangement, _Arrangement]:
    """The arrangements of patches, weights and vectors."""
    layout, layout_of_w, _ = case.dimension_numbers
    spatial = [axis for axis in layout if axis not in "NC"]
    group = ["group"] if case.groups > 1 else []
    at, element = ({axis: f"{word} {axis}" for axis in spatial} for word in ("position", "element"))
    features = (case.features // case.groups, case.out_features // case.groups)
    of_patch, of_vector = reversed(features) if case.transposed else features
    counts = case.spatial if case.transposed else [size // case.window for size in case.spatial]
    sizes = {"N": case.batch, "group": case.groups, "feature": of_patch, "vector": of_vector}
    sizes |= dict.fromkeys(element.values(), case.window) | dict(zip(at.values(), counts, strict=True))

    def arrangement(own: Mapping[str, Sequence[str]], letters: str, *matrix: Sequence[str]) -> _Arrangement:
        whole = [group, *matrix] if group else matrix
        # jax.lax.conv_transpose writes the last element of the window first.
        is_reversed = case.transposed and "O" in letters
        reversed_axes = [i for i, axis in enumerate(letters) if axis in spatial] if is_reversed else []
        return _Arrangement(sizes, [own[axis] for axis in letters], whole, frozenset(reversed_axes))

    rows, patch, vector = ["N", *at.values()], [*element.values(), "feature"], ["vector"]
    of_patches = {"N": ["N"], "C": [*group, "feature"], **{axis: [at[axis], element[axis]] for axis in spatial}}
    of_vectors = {"N": ["N"], "C": [*group, "vector"], **{axis: [at[axis]] for axis in spatial}}
    inputs, outputs = (["vector"], ["feature"]) if case.transposed else (["feature"], [*group, "vector"])
    of_weights = {"I": inputs, "O": outputs, **{axis: [element[axis]] for axis in spatial}}
    return (
        arrangement(of_patches, layout, rows, patch),
        arrangement(of_weights, layout_of_w, patch, vector),
        arrangement(of_vectors, layout, rows, vector),
    )
