"""Jobs that read features through the views."""
from __future__ import annotations

from typing import Callable, Iterable

from . import pages
from .views import ColumnView, JoinView, open_lookup, open_self_join


def mean_of(key: str, column: int) -> float:
    view = ColumnView.of(pages.TABLE, key, column)  # clean: closed before both returns
    values = view.values()
    view.close()
    if not values:
        return 0.0
    return sum(values) / len(values)


def spread(key: str, low: int, high: int) -> float:
    view = ColumnView.of(pages.TABLE, key, low)  # clean: near miss, the borrowed one needs no close
    other = view.narrow(high)
    width = max(other.values()) - min(view.values())
    view.close()
    return width


def drift(key: str, old: int, new: int) -> float:
    view = ColumnView.of(pages.TABLE, key, old)  # clean: closed below
    newer = view.twin(new)  # leak: a twin has a pin of its own, closing the first view leaves it raised
    delta = sum(newer.values()) - sum(view.values())
    view.close()
    return delta


def stability(key: str, old: int, new: int) -> float:
    view = ColumnView.of(pages.TABLE, key, old)  # clean: near miss, closed by the join with its twin
    join = JoinView(view, view.twin(new))  # clean: near miss, the join closes both sides
    pairs = join.pairs()
    join.close()
    return sum(abs(a - b) for a, b in pairs) / max(1, len(pairs))


def score_rows(left: str, right: str, rows: Iterable[int], model: Callable[..., float]) -> list[float]:
    lookup = open_lookup(pages.TABLE, left, right)  # clean: closed in finally
    try:
        return [model(*lookup.at(row)) for row in rows]
    finally:
        lookup.close()


def correlated(key: str, a: int, b: int, floor: float) -> bool:
    join = open_self_join(pages.TABLE, key, a, b)  # leak: too few pairs return ahead of close()
    pairs = join.pairs()
    if len(pairs) < 2:
        return False
    dot = sum(x * y for x, y in pairs)
    join.close()
    return dot >= floor


class FeatureServer:
    """Keeps hot pages pinned by reference count over the subscribers of each key."""

    def __init__(self, table: pages.PageTable) -> None:
        self.table = table
        self._hot: dict[str, pages.Page] = {}
        self._readers: dict[str, int] = {}
        self._warm: dict[str, pages.Page] = {}

    def subscribe(self, key: str) -> list[list[float]]:
        if key not in self._hot:
            self._hot[key] = self.table.pin(key)  # clean: near miss, one pin for all, the last reader unpins
        self._readers[key] = self._readers.get(key, 0) + 1
        return self._hot[key].rows

    def unsubscribe(self, key: str) -> None:
        self._readers[key] -= 1
        if self._readers[key] == 0:
            del self._readers[key]
            self.table.unpin(self._hot.pop(key))

    def warm(self, key: str) -> int:
        page = self._warm[key] = self.table.pin(key)  # leak: raised at each call of a key, cool() lowers 1
        return len(page.rows)

    def cool(self, key: str) -> None:
        page = self._warm.pop(key, None)
        if page is not None:
            self.table.unpin(page)
