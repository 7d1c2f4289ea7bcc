"""The Python code of README.md and docs/ runs, and prints what the pages say it prints."""

from __future__ import annotations

import dataclasses
import re
from contextlib import contextmanager
from pathlib import Path

import jax
import pytest

import jaxgrad
from jaxgrad._src.native import cuda

_ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "docs/accelerate.md",
    "docs/architecture.md",
    "docs/forward_mode.md",
    "docs/gpu.md",
    "docs/quickstart.md",
    "docs/recurrent.md",
    "docs/several_devices.md",
    "docs/transformations.md",
    "docs/tuning.md",
    "docs/unet.md",
    "docs/weights.md",
]
_GUIDE = _ROOT / "docs" / "contributing.md"
# A block of code, whose first line may name its file, and the block of its output, if that follows.
_CODE = re.compile(
    r"^```python\n(?P<code>(?:# (?P<file>\w+\.py)\n)?.*?)^```$(?:\s*^```text\n(?P<output>.*?)^```$)?", re.M | re.S
)
_LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")


@contextmanager
def _restored(settings):
    try:
        yield
    finally:
        jaxgrad.config.update(**dataclasses.asdict(settings))


@pytest.mark.parametrize("page", PAGES)
def test_code(page, capsys, tmp_path, monkeypatch):
    """The blocks of a page share their names. They run as on a CPU, with the defaults of a user's process."""
    blocks = list(_CODE.finditer((_ROOT / page).read_text()))
    assert blocks, f"{page} has no code"
    names = {"__name__": page}
    monkeypatch.chdir(tmp_path)
    settings = jaxgrad.config.current()
    with _restored(settings), jax.enable_x64(False), jax.default_device(jax.devices("cpu")[0]):
        for block in blocks:
            exec(compile(block["code"], block["file"] or page, "exec"), names)
            printed = "".join(f"{line.rstrip()}\n" for line in capsys.readouterr().out.splitlines())
            if block["output"] is None or (" on gpu" in block["output"] and not cuda.targets()):
                continue  # a build without the CUDA module knows no kernels of a GPU
            assert block["output"] == printed, f"a block of {page} prints\n{printed}"


_OP = """
import jax, jax.numpy as jnp, numpy as np
import jaxgrad._src

jaxgrad._src.__path__.append({folder!r})
from jaxgrad._src.row_norm.api import row_norm

def formula(x, scale):
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale

x, scale = jax.random.normal(jax.random.key(0), (3, 5, 7)), jnp.arange(1.0, 8.0)
for of_row_norm, of_formula in (
    (jax.vmap(row_norm, (0, None))(x, scale), formula(x, scale)),
    *(zip(*(jax.jit(jax.grad(lambda *args, f=f: jnp.sum(jnp.sin(f(*args))), (0, 1)))(x[0], scale)
            for f in (row_norm, formula)), strict=True)),
):
    np.testing.assert_allclose(of_row_norm, of_formula, rtol=2e-5, atol=2e-5)
try:
    row_norm(x, scale)
except ValueError as error:
    print(error)
print(jaxgrad.explain(row_norm))
"""


@pytest.mark.parametrize("with_kernel", [False, True])
def test_the_op_of_the_guide(with_kernel, run_python, tmp_path):
    """The files that docs/contributing.md has one write for a new op, without and with its kernel, are an op."""
    files = re.findall(r"^```python\n# jaxgrad/_src/(row_norm/\w+\.py)\n(.*?)^```$", _GUIDE.read_text(), re.M | re.S)
    (tmp_path / "row_norm").mkdir()
    for name, code in files if with_kernel else reversed(files):  # of a file that is shown twice, the last remains
        (tmp_path / name).write_text(code)
    # The kernel supports float32 alone, and its handler is not compiled.
    text = run_python(_OP.format(folder=str(tmp_path)), JAX_PLATFORMS="cpu", JAX_ENABLE_X64=str(with_kernel)).stdout
    assert "jaxgrad.row_norm: x must have rank 2" in text
    assert (
        "row_norm on cpu: forward: 'cpu' (jaxgrad's C++ kernel)" if with_kernel else "row_norm on cpu: 'xla'"
    ) in text


def _anchors(page):
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "page", [_ROOT / "README.md", *sorted((_ROOT / "docs").rglob("*.md"))], ids=lambda page: page.name
)
def test_links(page):
    for path, anchor in _LINK.findall(page.read_text()):
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {path}"
        assert not anchor or anchor in _anchors(target), f"{page.name} links to {path}#{anchor}"


def test_readme_is_short():
    assert len((_ROOT / "README.md").read_text().splitlines()) <= 150
