"""Which fixes can go in together: those whose edits neither overlap nor touch.

Touching counts, because what is put in at the edge of a block that another fix indents would keep the old
indentation. What two fixes both ask for (the same import) goes in once.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from auditor.fixes.document import BadEdit, Document
from auditor.model import Edit


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """An edit's range in one file."""

    path: str
    start: int
    end: int
    edit: Edit = field(compare=False)

    def meets(self, other: "Place") -> bool:
        """Overlaps or touches, without being the very same edit."""
        if self.path != other.path or self.edit == other.edit:
            return False
        return self.start <= other.end and other.start <= self.end

    def overlaps(self, other: "Place") -> bool:
        """Shares characters, or is a second edit at one place."""
        if self.path != other.path:
            return False
        shares = self.start < other.end and other.start < self.end
        return shares or (self.start, self.end) == (other.start, other.end)


def placed(edits: Iterable[Edit], documents: Mapping[str, Document]) -> list[Place]:
    """The edits of one fix where they go, each once. Raises BadEdit if they contradict one another."""
    places = sorted(_each(dict.fromkeys(edits), documents))
    for before, after in itertools.pairwise(places):
        if before.overlaps(after):
            raise BadEdit(f"{after.path}: two of its edits overlap")
    return places


def _each(edits: Iterable[Edit], documents: Mapping[str, Document]) -> Iterator[Place]:
    for edit in edits:
        document = documents.get(edit.span.path)
        if document is None:
            raise BadEdit(f"{edit.span.path} is no longer what was analysed")
        yield Place(edit.span.path, *document.offsets(edit.span), edit)


class Taken:
    """The places that are edited already."""

    def __init__(self) -> None:
        self._places: dict[str, list[Place]] = {}

    def in_the_way(self, places: Iterable[Place]) -> Place | None:
        """One of `places` that meets what is taken."""
        for place in places:
            if any(place.meets(taken) for taken in self._places.get(place.path, ())):
                return place
        return None

    def take(self, places: Iterable[Place]) -> None:
        for place in places:
            self._places.setdefault(place.path, []).append(place)
