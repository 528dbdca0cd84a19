"""Paged KV for long-context serving: page ids from a min-heap, reference counted for prefix sharing, swap to host frames."""
from __future__ import annotations

import heapq
import logging
from dataclasses import dataclass, field
from typing import Dict, Iterable, List, Optional, Set, Tuple

log = logging.getLogger("kv")


class PageHeap:
    """Lowest id first, so that the tail of the cache can be shrunk."""

    def __init__(self, n: int):
        self._heap = list(range(n))
        self._refs: Dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._heap)

    def allot(self) -> Optional[int]:
        if not self._heap:
            return None
        pid = heapq.heappop(self._heap)  # clean: returned to the caller with one reference
        self._refs[pid] = 1
        return pid

    def share(self, pid: int) -> int:
        self._refs[pid] += 1
        return pid

    def unshare(self, pid: int) -> None:
        self._refs[pid] -= 1
        if self._refs[pid] == 0:
            del self._refs[pid]
            heapq.heappush(self._heap, pid)

    def refs(self, pid: int) -> int:
        return self._refs.get(pid, 0)


class HostFrames:
    def __init__(self, n: int):
        self._vacant: Set[int] = set(range(n))

    def reserve(self, n: int) -> Optional[List[int]]:
        if len(self._vacant) < n:
            return None
        return [self._vacant.pop() for _ in range(n)]  # clean: returned to the caller

    def surrender(self, frames: Iterable[int]) -> None:
        self._vacant.update(frames)


@dataclass
class Sequence:
    sid: int
    tokens: List[int]
    pages: List[int] = field(default_factory=list)
    frames: Optional[List[int]] = None
    parent: Optional[int] = None


class BlockManager:
    def __init__(self, pages: PageHeap, frames: HostFrames, page_tokens: int = 64):
        self.pages = pages
        self.frames = frames
        self.page_tokens = page_tokens
        self.table: Dict[int, Sequence] = {}
        self.prefix: Dict[Tuple[int, ...], int] = {}

    def _need(self, n_tokens: int) -> int:
        return -(-n_tokens // self.page_tokens)

    def admit(self, seq: Sequence) -> bool:
        if seq.sid in self.table:
            return False
        got: List[int] = []
        for i in range(self._need(len(seq.tokens))):
            chunk = tuple(seq.tokens[: (i + 1) * self.page_tokens])
            hit = self.prefix.get(chunk)
            if hit is not None:
                got.append(self.pages.share(hit))  # clean: near miss, in got like the fresh ones
                continue
            pid = self.pages.allot()  # clean: in got, unshared when the admission fails, else in seq.pages
            if pid is None:
                for p in got:
                    self.pages.unshare(p)
                return False
            got.append(pid)
        seq.pages = got
        self.table[seq.sid] = seq
        return True

    def append_token(self, sid: int, token: int) -> bool:
        seq = self.table[sid]
        if len(seq.tokens) % self.page_tokens == 0:
            pid = self.pages.allot()  # clean: joins seq.pages before anything else can return
            if pid is None:
                return False
            seq.pages.append(pid)
        seq.tokens.append(token)
        return True

    def fork(self, sid: int, child: int) -> Sequence:
        if child in self.table:
            raise KeyError(child)
        src = self.table[sid]
        twin = Sequence(child, list(src.tokens), parent=sid)
        for p in src.pages:
            twin.pages.append(self.pages.share(p))  # clean: in the twin's pages, retire() drops them
        self.table[child] = twin
        return twin

    def make_writable(self, sid: int, copy) -> bool:
        """Copy on write for the last page."""
        seq = self.table[sid]
        last = seq.pages[-1]
        if self.pages.refs(last) == 1:
            return True
        fresh = self.pages.allot()  # leak: the copy engine's refusal returns without unshare
        if fresh is None:
            return False
        if not copy(last, fresh):
            log.warning("copy engine busy, page %d stays shared", last)
            return False
        seq.pages[-1] = fresh
        self.pages.unshare(last)
        return True

    def retire(self, sid: int) -> None:
        seq = self.table.pop(sid, None)
        if seq is None:
            return
        for p in seq.pages:
            self.pages.unshare(p)
        if seq.frames is not None:
            self.frames.surrender(seq.frames)

    def swap_out(self, sid: int, dma) -> bool:
        seq = self.table[sid]
        if seq.frames is not None:
            return True
        frames = self.frames.reserve(len(seq.pages))  # clean: moved into seq.frames, surrendered at swap_in or retire
        if frames is None:
            return False
        dma.to_host(seq.pages, frames)
        for p in seq.pages:
            self.pages.unshare(p)
        seq.pages = []
        seq.frames = frames
        return True

    def swap_in(self, sid: int, dma) -> bool:
        seq = self.table[sid]
        if seq.frames is None:
            return True
        got: List[int] = []
        for _ in seq.frames:
            pid = self.pages.allot()  # leak: running short returns with the pages already in got
            if pid is None:
                return False
            got.append(pid)
        dma.to_device(seq.frames, got)
        self.frames.surrender(seq.frames)
        seq.frames = None
        seq.pages = got
        return True

    def remember_prefix(self, sid: int) -> None:
        """Holds the first page of a sequence for later admissions."""
        seq = self.table[sid]
        key = tuple(seq.tokens[: self.page_tokens])
        if not seq.pages or len(key) < self.page_tokens:
            return
        self.prefix[key] = self.pages.share(seq.pages[0])  # leak: a second sequence with the key overwrites the shared page

    def forget_prefixes(self) -> None:
        for pid in self.prefix.values():
            self.pages.unshare(pid)
        self.prefix.clear()

    def trim_to(self, sid: int, n_tokens: int) -> None:
        seq = self.table[sid]
        keep = self._need(n_tokens)
        while len(seq.pages) > keep:
            self.pages.unshare(seq.pages.pop())
        del seq.tokens[n_tokens:]


class SpeculativeLane:
    """Scratch pages for draft tokens. accept() moves some to the sequence, the rest go back."""

    def __init__(self, mgr: BlockManager):
        self.mgr = mgr
        self.draft: List[int] = []

    def open(self, n: int) -> int:
        while len(self.draft) < n:
            pid = self.mgr.pages.allot()  # clean: near miss, in draft, which accept() and reject() empty
            if pid is None:
                break
            self.draft.append(pid)
        return len(self.draft)

    def accept(self, sid: int, n: int) -> None:
        seq = self.mgr.table.get(sid)
        taken, rest = self.draft[:n], self.draft[n:]
        self.draft = []
        if seq is None:
            rest = taken + rest
            taken = []
        for p in rest:
            self.mgr.pages.unshare(p)
        if seq is not None:
            seq.pages.extend(taken)

    def reject(self) -> None:
        for p in self.draft:
            self.mgr.pages.unshare(p)
        self.draft.clear()


def defrag(mgr: BlockManager, copy) -> int:
    moved = 0
    for seq in list(mgr.table.values()):
        for i, old in enumerate(seq.pages):
            if mgr.pages.refs(old) > 1:
                continue
            new = mgr.pages.allot()  # leak: a page above the old one is passed over by continue
            if new is None:
                return moved
            if new > old:
                continue
            copy(old, new)
            seq.pages[i] = new
            mgr.pages.unshare(old)
            moved += 1
    return moved


def can_host(mgr: BlockManager, seqs: List[Sequence]) -> bool:
    """True when all of the sequences could be swapped out together."""
    total = sum(len(s.pages) for s in seqs)
    frames = mgr.frames.reserve(total)  # leak: the reservation was only a question, and is kept
    return frames is not None
