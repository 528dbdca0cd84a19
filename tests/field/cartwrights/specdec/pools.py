"""The two resources of speculative decoding: draft slots and target pages."""

from __future__ import annotations

from dataclasses import dataclass, field


class CapacityError(RuntimeError):
    pass


@dataclass
class PageGrant:
    pages: list[int]
    owner: str = ""

    def __len__(self) -> int:
        return len(self.pages)


class PageLedger:
    """Pages are granted in one piece and settled in one piece or split."""

    def __init__(self, total: int) -> None:
        self._open = list(range(total))

    def grant(self, count: int, owner: str = "") -> PageGrant:
        if count > len(self._open):
            raise CapacityError(f"{owner}: {count} pages")
        return PageGrant([self._open.pop() for _ in range(count)], owner)  # clean: count was compared with the list, all are in the grant

    def grant_upto(self, count: int, owner: str = "") -> PageGrant | None:
        pages = []
        for _ in range(count):
            if not self._open:
                break
            pages.append(self._open.pop())  # leak: a partial list shorter than half of the wish is given up by the return of None
        if len(pages) * 2 < count:
            return None
        return PageGrant(pages, owner)

    def settle(self, grant: PageGrant) -> None:
        self._open.extend(grant.pages)
        grant.pages = []

    def trim(self, grant: PageGrant, keep: int) -> None:
        """Give back all but the first ``keep`` pages."""
        self._open.extend(grant.pages[keep:])
        del grant.pages[keep:]

    def absorb(self, into: PageGrant, other: PageGrant) -> None:
        into.pages.extend(other.pages)
        other.pages = []


@dataclass
class DraftSlots:
    size: int
    _idle: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._idle = set(range(self.size))

    def seat(self) -> int | None:
        if not self._idle:
            return None
        return self._idle.pop()  # clean: returned

    def unseat(self, slot: int) -> None:
        self._idle.add(slot)
