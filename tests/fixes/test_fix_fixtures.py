"""Each case of tests/fixtures/fixes: what a rule's fix makes of it, whether it is safe, that it is final."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from auditor.config import Settings
from auditor.engine import Request
from auditor.fixes.document import Document
from auditor.fixing import Fixing, plan_fixes
from auditor.model import Finding, Safety

FOLDER = Path(__file__).parent.parent / "fixtures" / "fixes"
CASE = re.compile(r"^# case: (.+) \((PA\d{3}), (safe|unsafe|none)\)\n", re.MULTILINE)
BECOMES = "# becomes\n"


@dataclass(frozen=True, slots=True)
class Example:
    name: str
    code: str
    safety: str
    before: str
    after: str


def examples() -> Iterator[Example]:
    for file in sorted(FOLDER.glob("*.py")):
        parts = CASE.split(file.read_text(encoding="utf-8"))[1:]
        for name, code, safety, text in zip(*(iter(parts),) * 4, strict=True):
            before, _, after = text.partition(BECOMES)
            yield Example(name, code, safety, before, after or before)


def fixed(file: Path, text: str, code: str) -> tuple[str, Fixing]:
    """The text with every fix of one rule, and what else came of it."""
    file.write_bytes(text.encode())
    settings = Settings(select=(code,))

    def choose(finding: Finding, documents: Mapping[str, Document]) -> str:
        return ""

    plan = plan_fixes(Request((str(file),), settings, file.parent), choose)
    changed = plan.repaired.documents
    return (next(iter(changed.values())).data.decode() if changed else text), plan


@pytest.mark.parametrize("example", list(examples()), ids=lambda example: f"{example.code} {example.name}")
def test_the_fix_is_this_one_and_final(example: Example, tmp_path: Path) -> None:
    text, plan = fixed(tmp_path / "code.py", example.before, example.code)
    assert text == example.after
    offered = {finding.fix.safety for finding in plan.repaired.fixed if finding.fix}
    assert offered == ({Safety(example.safety)} if example.safety != "none" else set())
    assert not any(left.failed for left in plan.repaired.left)
    again, second = fixed(tmp_path / "code.py", text, example.code)
    assert again == text
    assert second.repaired.fixed == ()


@pytest.mark.parametrize("newline", ["\r\n", "\r"])
@pytest.mark.parametrize("example", list(examples()), ids=lambda example: f"{example.code} {example.name}")
def test_other_line_ends_stay_everywhere(example: Example, newline: str, tmp_path: Path) -> None:
    text, _ = fixed(tmp_path / "code.py", example.before.replace("\n", newline), example.code)
    assert text == example.after.replace("\n", newline)


def test_fixtures_are_found() -> None:
    assert len(list(examples())) > 25
