"""Fixes into texts, one pass: each with all of its edits or with none, and the result must parse."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from auditor.fixes.document import BadEdit, Document
from auditor.fixes.overlap import Place, Taken, placed
from auditor.model import Edit, FixOffer
from auditor.source.load import Unreadable
from auditor.source.newer_syntax import in_older_syntax


class Fate(StrEnum):
    """What became of an offer in one pass."""

    APPLIED = "applied"
    LATER = "later"  # another fix of this pass is in the way: it may go in with the next pass
    REFUSED = "refused"  # it cannot be applied to these files


@dataclass(frozen=True, slots=True)
class Outcome:
    """One offer and what became of it; `reason` says why it was not applied."""

    offer: FixOffer
    fate: Fate
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Applied:
    """The files that changed, by path, and the outcome of every offer, in their order."""

    documents: Mapping[str, Document]
    outcomes: tuple[Outcome, ...]


def apply(offers: Sequence[FixOffer], documents: Mapping[str, Document]) -> Applied:
    """Apply what can go in together, earlier offers first. Nothing is written anywhere.

    `documents` holds every file that an edit may name. An offer is refused if its edits contradict one
    another or its file's encoding, or if they leave a file that does not parse; it is left for a later pass
    if an earlier offer's edits are in its way.
    """
    together = _pass(offers, documents, careful=False)
    if all(parses(document) for document in together.documents.values()):
        return together
    return _pass(offers, documents, careful=True)


def _pass(offers: Sequence[FixOffer], documents: Mapping[str, Document], *, careful: bool) -> Applied:
    """One pass; a `careful` one parses after every offer, so that only the one that breaks a file is out."""
    taken = Taken()
    accepted: list[Edit] = []
    outcomes = []
    for offer in offers:
        outcome, places = _admit(offer, documents, taken)
        if careful and outcome.fate is Fate.APPLIED:
            changed = edited([*accepted, *offer.edits], documents)
            broken = [path for path in _files(offer) if not parses(changed[path])]
            if broken:
                outcome = Outcome(offer, Fate.REFUSED, f"{broken[0]} would not be valid Python any more")
        if outcome.fate is Fate.APPLIED:
            taken.take(places)
            accepted += offer.edits
        outcomes.append(outcome)
    return Applied(edited(accepted, documents), tuple(outcomes))


def _admit(
    offer: FixOffer, documents: Mapping[str, Document], taken: Taken
) -> tuple[Outcome, Sequence[Place]]:
    """Whether the offer can go in beside what is taken, and where its edits go."""
    if not offer.edits:
        return Outcome(offer, Fate.REFUSED, "it is advice, without edits"), ()
    try:
        places = placed(offer.edits, documents)
        edited(offer.edits, documents)
    except (BadEdit, Unreadable) as error:
        return Outcome(offer, Fate.REFUSED, str(error)), ()
    if (blocked := taken.in_the_way(places)) is not None:
        where = f"{blocked.path}:{blocked.edit.span.line}"
        return Outcome(offer, Fate.LATER, f"another fix changes {where} too"), ()
    return Outcome(offer, Fate.APPLIED), places


def _files(offer: FixOffer) -> list[str]:
    return list(dict.fromkeys(edit.span.path for edit in offer.edits))


def edited(edits: Iterable[Edit], documents: Mapping[str, Document]) -> dict[str, Document]:
    """The documents that `edits` change, changed. Raises BadEdit."""
    by_path: dict[str, dict[Edit, None]] = {}
    for edit in edits:
        by_path.setdefault(edit.span.path, {})[edit] = None
    return {path: documents[path].edited(mine) for path, mine in by_path.items()}


def parses(document: Document) -> bool:
    """Whether the text is Python, this version's or a newer one's; it is compiled, never run."""
    text = document.text
    try:
        with warnings.catch_warnings(action="ignore"):  # of odd escapes; the code is not ours
            compile(text, document.path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return in_older_syntax(text) is not None
    return True
