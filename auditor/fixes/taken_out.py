"""What a method takes out of a container and loses on some way: told of the acquire that put it there, and
repaired where it is taken out, as if it were acquired by that call."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, takewhile

from auditor.arbitrate import arbitrate
from auditor.case import Case
from auditor.facts import Facts, Lease, StoredField
from auditor.model import FixOffer, Safety, Span
from auditor.rule import Rule, all_rules


def given_back_where_taken(case: Case) -> FixOffer | None:
    """The repairs of all calls that take it out; None if one of them, or another loss, would stay."""
    stored = _told(case)
    if stored is None or not all(drop.trace for drop in stored.drops):
        return None
    offers = [(there, fixed_there(there)) for there in where_taken(case)]
    found = [(there, offer) for there, offer in offers if offer is not None]
    if len(found) < len({drop.at for drop in stored.drops}):
        return None
    unsafe = any(offer.safety is Safety.UNSAFE for _, offer in found)
    described = "; ".join(f"in {taker(case, there)}: {offer.description}" for there, offer in found)
    edits = tuple(edit for _, offer in found for edit in offer.edits)
    return FixOffer(Safety.UNSAFE if unsafe else Safety.SAFE, described, edits)


def where_taken(case: Case) -> list[Case]:
    """The calls that take it out, each as a case of its own: the finding it would be if no acquire were known
    to have put it there."""
    stored = _told(case)
    places = dict.fromkeys(drop.at for drop in stored.drops if drop.trace) if stored is not None else ()
    return [there for at in places for there in _cases(case, at)]


def fixed_there(there: Case) -> FixOffer | None:
    rule = next(rule for rule in _balance() if rule.meta.code == there.finding.code)
    return rule.fix(there) if rule.fix is not None else None


def taker(case: Case, there: Case) -> str:
    """The function that takes it out, with its file where that is another one than the acquire's."""
    path = there.finding.span.path
    return f"`{there.finding.symbol}`" + ("" if path == case.finding.span.path else f" of {path}")


def _told(case: Case) -> StoredField | None:
    """The container of which the finding tells a way on which something is taken out and lost."""
    fields = case.lease.fields if case.lease is not None else ()
    steps = set(case.finding.trace)
    told = (field for field in fields if any(steps.intersection(drop.trace[-1:]) for drop in field.drops))
    return next(told, None)


def _cases(case: Case, at: Span) -> Iterator[Case]:
    lease = _followed_from(case.facts, at)
    if lease is not None:
        facts = Facts(leases=(replace(lease, leaks=lease.told_elsewhere, told_elsewhere=(), fields=()),))
        found = arbitrate(finding for rule in _balance() for finding in rule.check(facts))
        yield from (Case(finding, facts, case.sources) for finding in found)


def _followed_from(facts: Facts, at: Span) -> Lease | None:
    first = bisect_left(facts.leases, at, key=lambda lease: lease.span)  # they are sorted by it
    here = takewhile(lambda lease: lease.span == at, islice(facts.leases, first, None))
    return next((lease for lease in here if lease.told_elsewhere), None)


def _balance() -> Iterator[Rule]:
    """The rules about what becomes of an acquire."""
    return (rule for rule in all_rules() if rule.meta.code.startswith("PA1"))
