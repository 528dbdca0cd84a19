"""Wrappers of pages: a column view, a join of two of them, a cached lookup on top."""
from __future__ import annotations

from .pages import Page, PageTable


class ColumnView:
    """Owns one pin of its page unless it was given a borrowed page."""

    def __init__(self, table: PageTable, page: Page, column: int, borrowed: bool = False) -> None:
        self.table = table
        self.page: Page | None = page
        self.column = column
        self.borrowed = borrowed

    @classmethod
    def of(cls, table: PageTable, key: str, column: int) -> "ColumnView":
        page = table.pin(key)  # clean: the view owns it, close() unpins
        return cls(table, page, column)

    def narrow(self, column: int) -> "ColumnView":
        """Another column of the same page, without a pin of its own."""
        return ColumnView(self.table, self.page, column, borrowed=True)

    def twin(self, column: int) -> "ColumnView":
        """Another column of the same page that may outlive this view."""
        page = self.table.pin(self.page.key)  # clean: near miss, the twin owns this second pin
        return ColumnView(self.table, page, column)

    def values(self) -> list[float]:
        return [row[self.column] for row in self.page.rows]

    def close(self) -> None:
        page, self.page = self.page, None
        if page is not None and not self.borrowed:
            self.table.unpin(page)


class JoinView:
    """Two views side by side."""

    def __init__(self, left: ColumnView, right: ColumnView) -> None:
        self.left = left
        self.right = right

    def pairs(self) -> list[tuple[float, float]]:
        return list(zip(self.left.values(), self.right.values()))

    def close(self) -> None:
        self.left.close()
        self.right.close()


class LookupView:
    """A join with a default for missing rows; the top of three levels."""

    def __init__(self, join: JoinView, default: float) -> None:
        self._join = join
        self.default = default

    def at(self, row: int) -> tuple[float, float]:
        pairs = self._join.pairs()
        return pairs[row] if row < len(pairs) else (self.default, self.default)

    def close(self) -> None:
        self._join.close()


class WeightedView:
    """A join with a third column of weights."""

    def __init__(self, table: PageTable, join: JoinView, weight_key: str) -> None:
        self._join = join
        self._weights = ColumnView.of(table, weight_key, 0)  # leak: close() only closes the join

    def total(self) -> float:
        return sum(a * b * w for (a, b), w in zip(self._join.pairs(), self._weights.values()))

    def close(self) -> None:
        self._join.close()


def open_lookup(table: PageTable, left: str, right: str, default: float = 0.0) -> LookupView:
    first = ColumnView.of(table, left, 0)  # clean: near miss, closed through lookup, join and view
    second = ColumnView.of(table, right, 0)  # clean: near miss, as the first
    return LookupView(JoinView(first, second), default)


def open_self_join(table: PageTable, key: str, a: int, b: int) -> JoinView:
    base = ColumnView.of(table, key, a)  # clean: near miss, left of the join; narrow() has no pin to return
    return JoinView(base, base.narrow(b))


def open_transposed(table: PageTable, key: str, a: int, b: int) -> JoinView:
    base = ColumnView.of(table, key, 0)  # leak: both halves only borrow, and base itself is not kept
    return JoinView(base.narrow(a), base.narrow(b))
