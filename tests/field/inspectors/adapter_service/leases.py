"""Leases on spans of one pinned adapter arena."""
from typing import Optional


class Arena:
    """First-fit spans; the gaps are kept sorted by start."""

    def __init__(self, size: int) -> None:
        self._gaps = [(0, size)]

    def cut(self, nbytes: int) -> Optional[tuple[int, int]]:
        for i, (start, size) in enumerate(self._gaps):
            if size >= nbytes:
                self._gaps[i] = (start + nbytes, size - nbytes)
                return start, nbytes
        return None

    def cut_below(self, nbytes: int, limit: int) -> Optional[tuple[int, int]]:
        span = self.cut(nbytes)  # clean: near miss, a span beyond the limit is filled again
        if span is not None and span[0] + nbytes > limit:
            self.fill(span)
            return None
        return span

    def fill(self, span: tuple[int, int]) -> None:
        self._gaps.append(span)
        self._gaps.sort()


class Lease:
    """Shared by co-tenants; the last one to surrender fills the span."""

    def __init__(self, arena: Arena, span: tuple[int, int]) -> None:
        self.arena, self.span = arena, span
        self._tenants = 1

    def join(self) -> "Lease":
        self._tenants += 1
        return self

    def surrender(self) -> None:
        self._tenants -= 1
        if self._tenants == 0:
            self.arena.fill(self.span)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *exc) -> None:
        self.surrender()


def grant(arena: Arena, nbytes: int) -> Optional[Lease]:
    span = arena.cut(nbytes)  # clean: wrapped in the returned lease
    return Lease(arena, span) if span is not None else None


def grant_pair(arena: Arena, a_bytes: int, b_bytes: int) -> Optional[tuple[Lease, Lease]]:
    """Leases for the A and the B matrix."""
    first = grant(arena, a_bytes)  # leak: no room for B returns without surrendering A
    second = grant(arena, b_bytes) if first is not None else None  # clean: returned to the caller
    if second is None:
        return None
    return first, second
