"""Which folder a document is audited with: a workspace folder, or for a lone file just that file."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from auditor.server.workplace import Order


@dataclass(frozen=True, slots=True)
class Place:
    """What is audited together: the folder or the lone file at `location`."""

    location: str

    def order(self, documents: Mapping[str, str], *, glance: bool, number: int) -> Order:
        inside = {path: text for path, text in documents.items() if self.holds(path)}
        return Order(self.location, (self.location,), inside, glance, number)

    def holds(self, path: str) -> bool:
        return path == self.location or Path(self.location) in Path(path).parents


def place_of(path: str, folders: Iterable[Place]) -> Place:
    """The innermost workspace folder around `path`; without one, the file itself."""
    around = [folder for folder in folders if folder.holds(path)]
    return max(around, key=lambda folder: len(folder.location)) if around else Place(path)
