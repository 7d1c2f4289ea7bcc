"""The structure of the package: imports point downwards, and the compiled handlers are called in one place."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "jaxgrad"
# From the lowest layer to the highest. The op folders are one layer: no op imports another. The others are above them.
LAYERS = {
    "version": 0,
    "native": 1,
    "core": 2,
    "choice": 3,
    "run": 4,
    "conv": 5,
    "norm": 5,
    "gru": 5,
    "pool": 5,
    "resize": 5,
    "accelerate": 6,
    "convert": 6,
    "nn": 7,
    "tuning": 7,
    "bench": 8,
}


def _modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


MODULES = dict(_modules())


def _imports(path):
    """The modules of the package that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxgrad"):
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in MODULES else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)


GRAPH = {name: set(_imports(path)) for name, path in MODULES.items()}


def _folder(module):
    parts = module.split(".")
    return parts[2] if parts[:2] == ["jaxgrad", "_src"] and len(parts) > 2 else None


def test_the_graph_is_complete():
    assert len(MODULES) > 60
    assert sum(map(len, GRAPH.values())) > 200
    assert {_folder(name) for name in MODULES} == {None, *LAYERS}


def test_imports_have_no_cycles():
    tuple(TopologicalSorter(GRAPH).static_order())


@pytest.mark.parametrize("module", [name for name in MODULES if _folder(name)])
def test_imports_point_downwards(module):
    own = _folder(module)
    for imported in GRAPH[module]:
        folder = _folder(imported)
        assert folder is not None, f"{module} imports the public module {imported}"
        assert folder == own or LAYERS[folder] < LAYERS[own], f"{module} imports {imported}"


def test_handlers_are_called_in_one_place():
    functions = "jax.ffi.ffi_call(", "jax.ffi.ffi_lowering(", "mlir.custom_call("
    callers = [name for name, path in MODULES.items() if any(f in path.read_text() for f in functions)]
    assert callers == ["jaxgrad._src.native.ffi"]


def _asks_for_pytorch(node):
    return isinstance(node, ast.Call) and ast.unparse(node) == "pytest.importorskip('torch')"


def test_tests_that_need_pytorch_are_marked():
    """`pytest -m torch` runs them all: they ask for PyTorch where tests/conftest.py sees it."""
    tests, asking, seen = Path(__file__).parents[1], {}, {}
    for path in tests.rglob("*.py"):
        if "torch" in (text := path.read_text()):
            tree = ast.parse(text)
            asking[path] = sum(map(_asks_for_pytorch, ast.walk(tree)))
            assigned = [node for node in tree.body if isinstance(node, ast.Assign) and _asks_for_pytorch(node.value)]
            seen[path] = sum(ast.unparse(node.targets[0]) == "torch" for node in assigned)
    assert asking.pop(tests / "conftest.py") == 1, "the fixture torch"
    assert {path for path, count in asking.items() if count > seen[path]} == set()
    assert sum(asking.values()) > 4


def test_files_are_short():
    lengths = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    assert max(lengths.values()) <= 400, lengths
