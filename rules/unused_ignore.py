"""PA002 unused-ignore: a comment silences nothing.

What: `# poolaudit: ignore[...]` on a line, or alone above one, where no rule that it names finds anything.

Why: the fault it was about is gone, or the code is misspelt. Left there, it will hide the fault when it comes
back, and its reader looks for a problem that is not there.
"""

from collections.abc import Iterator

from auditor.facts import Facts
from auditor.model import Finding, Severity
from auditor.rule import Meta

META = Meta(code="PA002", name="unused-ignore", severity=Severity.WARNING)
BAD = "def f(x):\n    return x + 1  # poolaudit: ignore[PA101]\n"
GOOD = "def f(x):\n    return x + 1\n"


def check(facts: Facts) -> Iterator[Finding]:
    for comment in facts.suppressions:
        if not comment.codes and not comment.used:
            yield META.finding(comment.span, "", "nothing is found here, so there is nothing to silence")
        unused = [code for code in comment.codes if not any(used.startswith(code) for used in comment.used)]
        if unused:
            named = ", ".join(code or "an empty list of codes" for code in unused)
            yield META.finding(comment.span, "", f"{named} silences nothing here")
