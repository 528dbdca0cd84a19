"""docs/rules says what the rules say."""

from pathlib import Path

import pytest

from auditor.rule import Rule, all_rules
from docs.make_rule_pages import text

PAGES = Path(__file__).parent.parent / "docs" / "rules"


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.meta.code)
def test_the_page_is_the_rule(rule: Rule) -> None:
    """If this fails: python docs/make_rule_pages.py"""
    assert (PAGES / f"{rule.meta.code}.md").read_text(encoding="utf-8") == text(rule)


def test_no_page_without_a_rule() -> None:
    assert {page.stem for page in PAGES.glob("PA*.md")} == {rule.meta.code for rule in all_rules()}
