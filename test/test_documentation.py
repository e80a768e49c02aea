"""The Python blocks of the README and the docs run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from torchrl_trudi.trainers import config_table

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{i}")
    for page in PAGES
    for i, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.S))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_block(block):
    exec(compile(block, "<docs>", "exec"), {"__name__": "docs"})


def test_readme_example_is_short():
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.S)
    assert len([line for line in block.splitlines() if line.strip()]) <= 30


def test_option_table():
    """The table in the docs is the one that the code prints."""
    page = (ROOT / "docs" / "training.md").read_text("utf-8")
    assert config_table().strip() in page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links(page):
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text("utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
