"""The Python code of README.md and docs/ runs, and prints what the pages say it prints."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import pytest

from jaxgrad._src.native import cuda

_ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "docs/accelerate.md",
    "docs/architecture.md",
    "docs/forward_mode.md",
    "docs/quickstart.md",
    "docs/recurrent.md",
    "docs/several_devices.md",
    "docs/tuning.md",
    "docs/unet.md",
    "docs/weights.md",
]
# A block of code, whose first line may name its file, and the block of its output, if that follows.
_CODE = re.compile(
    r"^```python\n(?P<code>(?:# (?P<file>\w+\.py)\n)?.*?)^```$(?:\s*^```text\n(?P<output>.*?)^```$)?", re.M | re.S
)
_LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")


@pytest.mark.parametrize("page", PAGES)
def test_code(page, capsys, tmp_path, monkeypatch):
    """The blocks of a page share their names. They run as on a CPU, with the defaults of a user's process."""
    blocks = list(_CODE.finditer((_ROOT / page).read_text()))
    assert blocks, f"{page} has no code"
    names = {"__name__": page}
    monkeypatch.chdir(tmp_path)
    with jax.enable_x64(False), jax.default_device(jax.devices("cpu")[0]):
        for block in blocks:
            exec(compile(block["code"], block["file"] or page, "exec"), names)
            printed = "".join(f"{line.rstrip()}\n" for line in capsys.readouterr().out.splitlines())
            if block["output"] is None or (" on gpu" in block["output"] and not cuda.targets()):
                continue  # a build without the CUDA module knows no kernels of a GPU
            assert block["output"] == printed, f"a block of {page} prints\n{printed}"


def _anchors(page):
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "page", [_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_links(page):
    for path, anchor in _LINK.findall(page.read_text()):
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {path}"
        assert not anchor or anchor in _anchors(target), f"{page.name} links to {path}#{anchor}"


def test_readme_is_short():
    assert len((_ROOT / "README.md").read_text().splitlines()) <= 150
