"""Speculative decoding: draft pages, tree masks and verification."""
from __future__ import annotations

import heapq
import typing as tp
from dataclasses import dataclass, field


class PageHeap:
    """Lowest page id first, which keeps the draft cache dense."""

    def __init__(self, n: int) -> None:
        self._heap = list(range(n))

    def __len__(self) -> int:
        return len(self._heap)

    def grab(self) -> int | None:
        return heapq.heappop(self._heap) if self._heap else None

    def grab_run(self, n: int) -> list[int] | None:
        run: list[int] = []
        while len(run) < n:
            if not self._heap:
                return None
            run.append(heapq.heappop(self._heap))  # leak: running dry half way forgets the pages popped so far
        return run

    def grab_up_to(self, n: int) -> list[int]:
        run: list[int] = []
        while self._heap and len(run) < n:
            run.append(heapq.heappop(self._heap))  # clean: near miss, a short run is still returned
        return run

    def drop(self, *pages: int) -> None:
        for p in pages:
            heapq.heappush(self._heap, p)


class TreeMask:
    def __init__(self, width: int) -> None:
        self.width = width
        self.rows: list[int] = []


class MaskBank:
    def __init__(self, width: int, n: int) -> None:
        self._masks = [TreeMask(width) for _ in range(n)]

    def borrow(self) -> TreeMask | None:
        return self._masks.pop() if self._masks else None

    def give_back(self, m: TreeMask) -> None:
        m.rows.clear()
        self._masks.append(m)


@dataclass
class DraftState:
    rid: str
    pages: list[int] = field(default_factory=list)
    mask: TreeMask | None = None
    root_page: int | None = None


class Verifier(tp.Protocol):
    def verify(self, tokens: list[int], mask: TreeMask | None) -> int: ...


class SpecWorker:
    def __init__(self, pages: PageHeap, masks: MaskBank, verifier: Verifier, depth: int = 4) -> None:
        self.pages = pages
        self.masks = masks
        self.verifier = verifier
        self.depth = depth
        self.states: dict[str, DraftState] = {}

    def open(self, rid: str) -> DraftState | None:
        if rid in self.states:
            return self.states[rid]
        root = self.pages.grab()  # leak: end drops state.pages only, the root page is not among them
        if root is None:
            return None
        mask = self.masks.borrow()  # clean: the state's, end gives it back
        if mask is None:
            self.pages.drop(root)
            return None
        st = DraftState(rid, mask=mask, root_page=root)
        self.states[rid] = st
        return st

    def extend(self, rid: str) -> bool:
        st = self.states[rid]
        page = self.pages.grab()  # clean: near miss, None leaves the state alone, otherwise it is listed there
        if page is None:
            return False
        st.pages.append(page)
        return True

    def extend_many(self, rids: list[str]) -> list[str]:
        stalled = []
        for rid in rids:
            got = self.pages.grab_up_to(self.depth)  # leak: a request that has ended is skipped with its run in hand
            st = self.states.get(rid)
            if st is None:
                continue
            if len(got) < self.depth:
                stalled.append(rid)
            st.pages += got
        return stalled

    def top_up(self, rids: list[str]) -> int:
        n = 0
        for rid in rids:
            st = self.states.get(rid)
            if st is None:
                continue
            got = self.pages.grab_up_to(self.depth - len(st.pages))  # clean: near miss, the state is looked up before, and takes a short run too
            if not got:
                break
            st.pages += got
            n += len(got)
        return n

    def verify(self, rid: str, tokens: list[int]) -> int:
        st = self.states[rid]
        accepted = self.verifier.verify(tokens, st.mask)
        surplus = st.pages[accepted:]
        del st.pages[accepted:]
        self.pages.drop(*surplus)
        return accepted

    def verify_dense(self, tokens: list[int]) -> int:
        mask = self.masks.borrow()  # leak: nothing accepted is the early return without give_back
        if mask is None:
            return 0
        mask.rows.extend(range(len(tokens)))
        accepted = self.verifier.verify(tokens, mask)
        if accepted == 0:
            return 0
        self.masks.give_back(mask)
        return accepted

    def verify_tree(self, branches: list[list[int]]) -> tuple[int, list[int]]:
        best: tuple[int, list[int]] = (0, [])
        for branch in branches:
            mask = self.masks.borrow()  # clean: near miss, each turn gives it back before its continue
            if mask is None:
                break
            mask.rows.extend(range(len(branch)))
            n = self.verifier.verify(branch, mask)
            self.masks.give_back(mask)
            if n <= best[0]:
                continue
            best = (n, branch[:n])
        return best

    def remask(self, rid: str) -> bool:
        st = self.states[rid]
        fresh = self.masks.borrow()  # clean: near miss, the mask it takes over from goes back
        if fresh is None:
            return False
        old, st.mask = st.mask, fresh
        if old is not None:
            fresh.rows.extend(old.rows)
            self.masks.give_back(old)
        return True

    def rebase(self, rid: str, n: int) -> bool:
        st = self.states[rid]
        run = self.pages.grab_run(n)  # leak: the pages of the state before are overwritten, not dropped
        if run is None:
            return False
        st.pages = run
        return True

    def end(self, rid: str) -> None:
        st = self.states.pop(rid, None)
        if st is None:
            return
        self.pages.drop(*st.pages)
        if st.mask is not None:
            self.masks.give_back(st.mask)
