"""The form in which XLA runs a pass: as a convolution, or as matrix products where XLA is slow at convolutions.

`conv/on_xla/xla.py` writes the forms. Which of them is the fastest is in the tables of preferences (choice/table.py).
"""

from __future__ import annotations

from functools import partial

from jaxgrad._src.choice.table import preference
from jaxgrad._src.conv.call.features import ConvFeatures
from jaxgrad._src.conv.call.params import ConvCall
from jaxgrad._src.conv.call.problem import ConvProblem
from jaxgrad._src.conv.on_xla.patches import has_few_groups

CONVOLUTION = "convolution"
PRODUCT = "product"  # one matrix product, of a window that covers all of x
PATCHES = "patches"  # one matrix product of the windows, which do not overlap (patches.py)
TAPS = "taps"  # weight gradients only: products for each tap of the window, or each independent problem (taps.py)

OP = "conv_on_xla"  # of the rows of the tables

MATRIX_PRODUCT = "XLA lowers a window that covers all of x to a matrix product"
OF_PATCHES = "XLA runs one matrix product, because windows do not overlap"
OF_PATCHES_BY_GROUP = "XLA runs one matrix product for each group, because windows do not overlap"
_BY_TAPS = "XLA runs products for each tap of the window"
_OF_PROBLEMS = "XLA runs matrix products of the independent problems"


def forms(pass_name: str, problem: ConvProblem) -> tuple[str, ...]:
    """The forms that compute a pass."""
    g = problem.geometry
    if g.is_matrix_product:
        return (PRODUCT, CONVOLUTION)
    found: list[str] = []
    if g.has_disjoint_windows and not (problem.is_depthwise and g.feature_group_count > 1):
        found.append(PATCHES)
    if pass_name == "weight_gradient" and (g.feature_group_count > 1 or problem.num_problems):
        found.append(TAPS)
    return (*found, CONVOLUTION)


def preferred_form(pass_name: str, problem: ConvProblem, platform: str) -> str:
    """The fastest form of a pass in a program for a platform: "cuda", or another one, which is taken for a CPU."""
    among = forms(pass_name, problem)
    if len(among) == 1:
        return among[0]
    platform = "cuda" if platform == "cuda" else "cpu"
    choose = partial(preference, OP, pass_name, platform, ConvFeatures(problem, platform), among)
    row = choose()
    if row is not None and row.prefer == CONVOLUTION and problem.num_problems:
        row = choose(resized=True) or row  # the convolution has the groups that independent problems become
    assert row is not None
    return row.prefer


def form_on_xla(pass_name: str, problem: ConvProblem, platform: str) -> str:
    """Returns in which form XLA runs a pass, in a sentence; empty if it runs a convolution."""
    return _reason(preferred_form(pass_name, problem, platform), pass_name, problem)


def remark_on_xla(pass_name: str, call: ConvCall, platform: str) -> str:
    """Returns the remark that `jaxgrad.explain` adds where XLA runs a pass."""
    return form_on_xla(pass_name, call.problem, platform)


def _reason(form: str, pass_name: str, problem: ConvProblem) -> str:
    by_group = pass_name == "forward" and has_few_groups(problem.geometry)
    return {
        PRODUCT: MATRIX_PRODUCT,
        PATCHES: OF_PATCHES_BY_GROUP if by_group else OF_PATCHES,
        TAPS: _OF_PROBLEMS if problem.num_problems else _BY_TAPS,
        CONVOLUTION: "",
    }[form]
