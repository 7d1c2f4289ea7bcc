"""The examples in the docstrings of the public names run as they are printed."""

from __future__ import annotations

import doctest

import jax
import jax.numpy as jnp
import pytest

import jaxgrad
from jaxgrad import convert, nn
from jaxgrad.nn import equinox, haiku, keras, linen, nnx

pytestmark = pytest.mark.jax_version

WITHOUT_EXAMPLES = (
    *("__version__", "config", "convert", "nn"),
    *("Call", "Convolution", "Explanation", "Layer", "PassExplanation", "Report"),
)
MODULES = jaxgrad, convert, nn, linen, nnx, equinox, haiku, keras
PUBLIC = {f"{module.__name__}.{name}": getattr(module, name) for module in MODULES for name in module.__all__}
NAMES = [name for name in PUBLIC if name.removeprefix("jaxgrad.") not in WITHOUT_EXAMPLES]


@pytest.mark.parametrize("name", NAMES)
def test_example(name):
    """Examples are printed as on a CPU, with the defaults of a user's process."""
    finder = doctest.DocTestFinder(recurse=False)
    (test,) = finder.find(PUBLIC[name], name, globs={"jax": jax, "jnp": jnp, "jaxgrad": jaxgrad})
    assert test.examples, f"{name} has no example"
    with jax.enable_x64(False), jax.default_device(jax.devices("cpu")[0]):
        results = doctest.DocTestRunner(verbose=False).run(test)
    assert results.failed == 0
