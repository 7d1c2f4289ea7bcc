"""Finds the calls of a program in its jaxpr."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params

from jaxgrad._src.accelerate import conv_calls, op_calls
from jaxgrad._src.accelerate.calls import Call
from jaxgrad._src.accelerate.places import Place
from jaxgrad._src.conv.call.params import ConvParams
from jaxgrad._src.pool import equation as pool_equation
from jaxgrad._src.run.named_jit import PassName


@dataclasses.dataclass
class Found:
    """What a jaxpr has.

    Attributes:
      calls: the calls and how often each occurs, in the order of the program.
      products: the operations of matrix products outside the calls; None for symbolic shapes.
    """

    calls: Counter[Call] = dataclasses.field(default_factory=Counter)
    products: int | None = 0

    def add(self, other: Found) -> None:
        self.calls.update(other.calls)
        self.products = None if None in (self.products, other.products) else self.products + other.products  # type: ignore[operator]


def search(jaxpr: Jaxpr, platform: str, problem: str) -> Found:
    """Searches a jaxpr.

    Args:
      jaxpr: the program.
      platform: "cpu" or "gpu".
      problem: why equations cannot be accelerated; empty if they can.
    """
    known: dict[tuple[Any, ...], Found] = {}  # programs share jaxprs

    def search_in(jaxpr: Jaxpr, outer: Place, identity: tuple[str, tuple[Any, ...]] | None) -> Found:
        """`identity` is that of the pass of jaxgrad that the jaxpr belongs to."""
        key = jaxpr, outer, identity
        if key in known:
            return known[key]
        found = known[key] = Found()
        for equation in jaxpr.eqns:
            place = outer.of(equation)
            # `vmap` changes the shapes of the jitted pass, and of the call inside to what its kernels take.
            if identity is not None and equation.primitive.name == "custom_vmap_call":
                found.calls[_of_pass(equation, identity, place, platform)] += 1
            elif identity is None and equation.primitive is lax.conv_general_dilated_p:
                found.calls[conv_calls.of_lax(equation, place, platform, problem)] += 1
            elif identity is None and equation.primitive in pool_equation.PRIMITIVES:
                found.calls[op_calls.of_lax_pooling(equation, place, platform, problem)] += 1
            elif identity is None and equation.primitive is lax.dot_general_p:
                found.add(Found(products=_product_flops(equation, place)))
            else:
                name = equation.params.get("name")
                inside = name.identity if isinstance(name, PassName) else identity
                for inner in jaxprs_in_params(equation.params):
                    found.add(search_in(inner, place.inside(equation), inside))
        return found

    return search_in(jaxpr, Place(), None)


def _of_pass(equation: JaxprEqn, identity: tuple[str, tuple[Any, ...]], place: Place, platform: str) -> Call:
    """A call of a pass of one of jaxgrad's ops."""
    name, (params, *rest) = identity
    if isinstance(params, ConvParams):
        return conv_calls.of_op(equation, name, params, rest, place, platform)
    return op_calls.of_op(equation, name, params, rest, place, platform)


def _product_flops(equation: JaxprEqn, place: Place) -> int | None:
    ((contracted, _), _) = equation.params["dimension_numbers"]
    lhs: Any = equation.invars[0].aval
    result: Any = equation.outvars[0].aval
    sizes = [*result.shape, *(lhs.shape[axis] for axis in contracted)]
    return 2 * place.repeats * math.prod(sizes) if all(isinstance(size, int) for size in sizes) else None
