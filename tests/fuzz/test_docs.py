"""SECURITY.md and TRUST.md name tests and targets: they must be there."""

import re
from pathlib import Path

import pytest

from .targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]
TESTS = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")}


@pytest.mark.parametrize("page", ["SECURITY.md", "TRUST.md"])
def test_what_the_page_names_exists(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    functions = set(re.findall(r"`(test_\w+)`", text))
    files = set(re.findall(r"\b(test_\w+\.py)\b", text))
    targets = {name for group in re.findall(r"targets? ((?:`[^`]+`(?:, | and )?)+)", text) for name in re.findall("`([^`]+)`", group)}
    assert functions | files and targets
    defined = {name for content in TESTS.values() for name in re.findall(r"^def (test_\w+)", content, re.MULTILINE)}
    assert functions <= defined and files <= set(TESTS) and targets <= set(TARGETS)
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / "docs" / link).exists(), link


def test_every_target_is_in_the_table():
    text = (ROOT / "docs" / "TRUST.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in TARGETS)
