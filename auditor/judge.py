"""From facts to findings: rules run, one verdict an acquire, fingerprints, comments that silence."""

import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from auditor.arbitrate import arbitrate, by_place
from auditor.case import Case, Sources
from auditor.excerpts import excerpts
from auditor.facts import Facts, Suppression
from auditor.fingerprint import fingerprinted
from auditor.fixes.unfixed import UNFIXABLE, why_unfixed
from auditor.model import Failure, Finding
from auditor.rule import Rule, all_rules
from auditor.source.suppress import silence
from auditor.texts import Texts

Excerpts = dict[str, dict[int, str]]


class RuleFailed(Exception):
    """A rule raised: our fault, never the audited tree's."""


@dataclass(frozen=True, slots=True)
class Judged:
    """Every finding of every rule, selected or not, the source lines that they name, and the fixes whose
    building raised: their findings stand, without a fix."""

    findings: tuple[Finding, ...]
    excerpts: Excerpts
    broken_fixes: tuple[Failure, ...]


def judge(
    facts: Facts, comments: Sequence[Suppression], texts: Texts, repair_in: frozenset[str] | None = None
) -> Judged:
    """Run the rules, silence what comments silence, and build the fixes of what is left: in the files
    `repair_in`, or in all.

    The PA0 rules judge the comments, so they run last; whether a comment silences something does not depend
    on which rules are selected.
    """
    about_code = [rule for rule in all_rules() if not _about_comments(rule)]
    about_comments = [rule for rule in all_rules() if _about_comments(rule)]
    found = fingerprinted(arbitrate(_run(about_code, facts)), texts.lines)
    kept, used = silence(found, comments)
    complaints = fingerprinted(
        arbitrate(_run(about_comments, replace(facts, suppressions=used))), texts.lines
    )
    wanting = [each for each in kept if repair_in is None or each.span.path in repair_in]
    others = [each for each in kept if repair_in is not None and each.span.path not in repair_in]
    repairable, broken = _repairable(wanting, facts, texts)
    findings = tuple(sorted([*repairable, *others, *complaints], key=by_place))
    return Judged(findings, excerpts(findings, texts.lines), tuple(broken))


def _repairable(
    findings: Iterable[Finding], facts: Facts, texts: Texts
) -> tuple[list[Finding], list[Failure]]:
    """The findings, each with its rule's fix where one can be built, and where building one raised."""
    fixes = {rule.meta.code: rule.fix for rule in all_rules() if rule.fix}
    sources = Sources(texts)
    found, broken = [], []
    for finding in findings:
        if fix := fixes.get(finding.code):
            try:
                case = Case(finding, facts, sources)
                offer = fix(case)
                finding = replace(finding, fix=offer, unfixed="" if offer else why_unfixed(case))
            except Exception as error:  # one fix's fault must not cost the user every other finding
                broken.append(Failure(finding.span.path, finding.span.line, _blamed(finding.code, error)))
        else:
            finding = replace(finding, unfixed=UNFIXABLE)
        found.append(finding)
    return found, broken


def _blamed(code: str, error: Exception) -> str:
    """What went wrong in ourselves, and where: the finding itself is told as ever."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    said = f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})"
    return f"no fix of {code}: poolaudit failed with {said}; its finding stands"


def _about_comments(rule: Rule) -> bool:
    return rule.meta.code.startswith("PA0")


def _run(rules: Iterable[Rule], facts: Facts) -> list[Finding]:
    found: list[Finding] = []
    for rule in rules:
        try:
            found += rule.check(facts)
        except Exception as error:
            raise RuleFailed(f"rule {rule.meta.code} failed: {type(error).__name__}: {error}") from error
    return found
