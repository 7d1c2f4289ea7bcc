"""`import jaxgrad` is quick: it loads no op, and JAX does nothing. The rest is loaded where it is first used."""

from __future__ import annotations

import ast
import sys
import typing
from pathlib import Path

import pytest

import jaxgrad

pytestmark = pytest.mark.jax_version

LAZY = [name for name in jaxgrad.__all__ if name != "config"]

_LOADED = """
import sys
import jax
import jax.extend.core  # has the public name of a primitive; what it loads depends on the release of JAX
before = set(sys.modules)
import jaxgrad
print(*sorted(set(sys.modules) - before))
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
"""


def test_what_the_import_loads(run_python):
    loaded = run_python(_LOADED).stdout.split()
    own = [name for name in loaded if name.startswith("jaxgrad.")]
    assert "jaxgrad._cpu" in own  # exported programs call the kernels
    rooms = {name.split(".")[2] for name in own if name.startswith("jaxgrad._src.")}
    assert rooms <= {"native", "core", "choice", "run", "version"}
    assert len(own) <= 25, own
    assert {name.split(".")[0] for name in loaded} - set(sys.stdlib_module_names) == {"jaxgrad"}


_TRACES = """
import jax
import jaxgrad
traces = []
function = jax.jit(lambda x: traces.append(x) or 2 * x)
function(1.0)
for name in jaxgrad.__all__:
    getattr(jaxgrad, name)
function(1.0)
assert len(traces) == 1, traces
"""


def test_loading_does_not_invalidate_programs(run_python):
    """The settings in JAX's trace context are made by the import: a later one would change the keys of all programs."""
    run_python(_TRACES)


def test_type_checkers_see_the_modules_that_are_loaded():
    tree = ast.parse(Path(jaxgrad.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    checked = {alias.name: node.module for node in block.body for alias in node.names}
    assert checked.keys() == set(LAZY)
    for name, module in checked.items():
        value = getattr(jaxgrad, name)
        assert typing.cast("str", getattr(value, "__module__", module)) == module or module == "jaxgrad"


@pytest.mark.parametrize("package", [jaxgrad.nn, jaxgrad.convert], ids=lambda package: package.__name__)
def test_modules_of_frameworks_need_no_import_of_their_own(package):
    for library in ("haiku", "keras", "onnx"):
        pytest.importorskip(library)
    names = [path.stem for path in Path(package.__file__).parent.glob("[!_]*.py")]
    assert len(names) >= 4
    assert set(dir(package)) == {*package.__all__, *names}
    for name in names:
        assert package.__getattr__(name) is sys.modules[f"{package.__name__}.{name}"]
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'mxnet'"):
        package.mxnet  # noqa: B018


def test_names():
    assert set(dir(jaxgrad)) == set(jaxgrad.__all__)
    with pytest.raises(AttributeError, match="module 'jaxgrad' has no attribute 'gro'"):
        jaxgrad.gro  # noqa: B018
