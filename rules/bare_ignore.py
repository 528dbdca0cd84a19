"""PA001 bare-ignore: a comment silences every rule on its line.

What: `# poolaudit: ignore` without codes.

Why: it was written for one finding, and it hides the next one too. Whoever changes the line a year later gets
no warning about a leak of another kind, and nobody can tell which one was meant.
"""

from collections.abc import Iterator

from auditor.facts import Facts
from auditor.model import Finding, Severity
from auditor.rule import Meta

META = Meta(code="PA001", name="bare-ignore", severity=Severity.WARNING)
BAD = "def f(pool):\n    pool.allocate(8)  # poolaudit: ignore\n"
GOOD = "def f(pool):\n    pool.allocate(8)  # poolaudit: ignore[PA104]\n"


def check(facts: Facts) -> Iterator[Finding]:
    for comment in facts.suppressions:
        if not comment.codes:
            named = ", ".join(comment.used) or "the codes it is about"
            yield META.finding(comment.span, "", f"this silences every rule; write ignore[{named}]")
