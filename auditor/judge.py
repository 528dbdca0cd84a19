"""From facts to findings: rules run, one verdict an acquire, fingerprints, comments that silence."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from auditor.arbitrate import arbitrate, by_place
from auditor.case import Case, Sources
from auditor.excerpts import excerpts
from auditor.facts import Facts, Suppression
from auditor.fingerprint import fingerprinted
from auditor.model import Finding
from auditor.rule import Rule, all_rules
from auditor.source.suppress import silence
from auditor.texts import Texts

Excerpts = dict[str, dict[int, str]]


class RuleFailed(Exception):
    """A rule raised: our fault, never the audited tree's."""


def judge(
    facts: Facts, comments: Sequence[Suppression], texts: Texts, repair_in: frozenset[str] | None = None
) -> tuple[list[Finding], Excerpts]:
    """Every finding of every rule, selected or not, and the source lines that they name. Those in the files
    `repair_in`, or all, carry their fix.

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
    repairable = [each for each in kept if repair_in is None or each.span.path in repair_in]
    others = [each for each in kept if repair_in is not None and each.span.path not in repair_in]
    findings = sorted([*_repairable(repairable, facts, texts), *others, *complaints], key=by_place)
    return findings, excerpts(findings, texts.lines)


def _repairable(findings: Iterable[Finding], facts: Facts, texts: Texts) -> Iterator[Finding]:
    """The findings, each with its rule's fix where one can be built."""
    fixes = {rule.meta.code: rule.fix for rule in all_rules() if rule.fix}
    sources = Sources(texts)
    for finding in findings:
        if fix := fixes.get(finding.code):
            try:
                finding = replace(finding, fix=fix(Case(finding, facts, sources)))
            except Exception as error:
                where = f"{finding.span.path}:{finding.span.line}"
                reason = f"the fix of {finding.code} at {where} failed: {type(error).__name__}: {error}"
                raise RuleFailed(reason) from error
        yield finding


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
