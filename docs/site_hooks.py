"""Hooks of mkdocs: the first page is README.md, and links to files outside of docs/ lead to the repository."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_README = Path(__file__).parents[1] / "README.md"
_CODE = re.compile(r"(^```.*?^```$)", re.M | re.S)
# Links of Markdown, and sources of images in HTML, that name neither a host nor an anchor of their own page.
_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>(?!https?:|#)[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
_SOURCE = re.compile(r'(?<=src=")(?!https?:)[^"]+')


def on_files(files: Files, config: Any) -> Files:
    files.append(File.generated(config, "index.md", content=_README.read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    own = page.file.src_uri
    folder = "" if own == "index.md" else posixpath.join("docs", posixpath.dirname(own))

    def in_repository(target: str) -> str:
        return posixpath.normpath(posixpath.join(folder, target))

    def in_site(target: str) -> str | None:
        """The target from this page, if the site has it."""
        path = in_repository(target)
        inside = path.removeprefix("docs/")
        return posixpath.relpath(inside, posixpath.dirname(own) or ".") if inside != path else None

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match["text"], match["target"], match["anchor"] or ""
        if found := in_site(target):
            return f"[{text}]({found}{anchor})"
        if config.repo_url:
            return f"[{text}]({posixpath.join(config.repo_url, 'blob/main', in_repository(target))})"
        return text

    parts = _CODE.split(markdown)
    for i in range(0, len(parts), 2):  # the others are code
        text = _SOURCE.sub(lambda match: in_site(match[0]) or match[0], parts[i])
        parts[i] = _LINK.sub(link, text)
    return "".join(parts)
