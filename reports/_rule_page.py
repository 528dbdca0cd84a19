"""A rule's documentation taken apart: what each format shows of it, and in which markup."""

import re
from dataclasses import dataclass

from auditor.model import Finding, RuleInfo, Run

_HEADING = re.compile(r"^## +", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Section:
    heading: str
    paragraphs: tuple[str, ...]


def shown(run: Run) -> tuple[RuleInfo, ...]:
    """The run's rules, and the bare names of those that its findings name beside them."""
    rules = {rule.code: rule for rule in run.rules}
    for finding in run.findings:
        rules.setdefault(finding.code, _bare(finding))
    return tuple(rules[code] for code in sorted(rules))


def _bare(finding: Finding) -> RuleInfo:
    return RuleInfo(finding.code, finding.name, finding.severity, True, "", "", "")


def title(rule: RuleInfo) -> str:
    """What the first line says after code and name: `still owned when the function leaves early.`"""
    first = rule.page.partition("\n")[0]
    return first.partition(": ")[2] or first or rule.name.replace("-", " ")


def sections(rule: RuleInfo) -> tuple[Section, ...]:
    """The parts under headings; a sentence that only points at BAD and GOOD stays out, these follow."""
    found = []
    for part in _HEADING.split(rule.page)[1:]:
        heading, _, text = part.partition("\n")
        paragraphs = tuple(" ".join(block.split()) for block in text.split("\n\n") if block.strip())
        found.append(Section(heading.strip(), paragraphs))
    return tuple(found)


def markdown(rule: RuleInfo) -> str:
    """The page with its two examples, in Markdown."""
    examples = "".join(
        f"\n\n### {kind}\n\n```python\n{code.strip()}\n```"
        for kind, code in (("Bad", rule.bad), ("Good", rule.good))
        if code
    )
    return (rule.page or f"{rule.code} {rule.name}") + examples


def text(rule: RuleInfo) -> str:
    """The page with its two examples, for readers that show no markup."""
    examples = "".join(
        f"\n\n{kind}:\n\n{code.strip()}" for kind, code in (("Bad", rule.bad), ("Good", rule.good)) if code
    )
    return _HEADING.sub("", rule.page or f"{rule.code} {rule.name}") + examples
