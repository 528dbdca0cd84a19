"""Make docs/rules anew, one page a rule: `python docs/make_rule_pages.py`. A test holds the pages to the
rules."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from auditor.cli.rule_command import page  # noqa: E402 - needs the path above
from auditor.rule import Rule, all_rules  # noqa: E402

PAGES = ROOT / "docs" / "rules"


def text(rule: Rule) -> str:
    """What `poolaudit rule CODE` prints, under the rule's name."""
    return f"# {rule.meta.code} {rule.meta.name}\n\n{page(rule).strip()}\n"


def main() -> None:
    PAGES.mkdir(exist_ok=True)
    for old in PAGES.glob("*.md"):
        old.unlink()
    lines = ["# Rules", ""]
    for rule in all_rules():
        (PAGES / f"{rule.meta.code}.md").write_text(text(rule), encoding="utf-8")
        state = "" if rule.meta.default else " (off by default)"
        lines.append(
            f"- [{rule.meta.code} {rule.meta.name}]({rule.meta.code}.md): {rule.meta.severity}{state}"
        )
    (PAGES / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
