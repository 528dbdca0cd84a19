"""Paged attention cache of the policy's sampler: page table, sequence forks, prefix sharing."""
from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Dict, List, Optional

PAGE = 16


class PageTable:
    """Pages have reference counts: alloc() gives one with count 1, share() adds one, free() takes one off."""

    def __init__(self, total: int) -> None:
        self._free = list(range(total))
        self._count: Dict[int, int] = {}

    def alloc(self) -> Optional[int]:
        if not self._free:
            return None
        page = self._free.pop()
        self._count[page] = 1
        return page

    def alloc_many(self, n: int) -> Optional[List[int]]:
        """All or nothing."""
        if len(self._free) < n:
            return None
        pages = [self._free.pop() for _ in range(n)]
        for page in pages:
            self._count[page] = 1
        return pages

    def share(self, page: int) -> int:
        self._count[page] += 1
        return page

    def free(self, page: int) -> None:
        self._count[page] -= 1
        if self._count[page] == 0:
            del self._count[page]
            self._free.append(page)

    def available(self) -> int:
        return len(self._free)


@dataclass
class Sequence:
    sid: int
    tokens: List[int]
    pages: List[int] = field(default_factory=list)
    finished: bool = False


class Sampler:
    def __init__(self, table: PageTable) -> None:
        self.table = table
        self.live: Dict[int, Sequence] = {}
        self.next_sid = 0

    def admit(self, prompt: List[int]) -> Optional[Sequence]:
        need = (len(prompt) + PAGE - 1) // PAGE
        pages = self.table.alloc_many(need)  # clean: retire() frees the pages of the sequence
        if pages is None:
            return None
        seq = Sequence(self.next_sid, list(prompt), pages)
        self.next_sid += 1
        self.live[seq.sid] = seq
        return seq

    def append_token(self, seq: Sequence, token: int) -> bool:
        if len(seq.tokens) % PAGE == 0:
            page = self.table.alloc()  # clean: goes into seq.pages, which retire() frees
            if page is None:
                return False
            seq.pages.append(page)
        seq.tokens.append(token)
        return True

    def fork(self, seq: Sequence) -> Sequence:
        shared = [self.table.share(p) for p in seq.pages]  # clean: near miss, retire() frees them
        child = Sequence(self.next_sid, list(seq.tokens), shared)
        self.next_sid += 1
        self.live[child.sid] = child
        return child

    def retire(self, sid: int) -> None:
        seq = self.live.pop(sid, None)
        if seq is None:
            return
        for page in seq.pages:
            self.table.free(page)
        seq.pages = []
        seq.finished = True


def score_prefix(table: PageTable, prompt: List[int], logits) -> Optional[float]:
    pages = table.alloc_many(len(prompt) // PAGE + 1)  # leak: the last page is left out of the loop
    if pages is None:
        return None
    value = logits(prompt, pages)
    for page in pages[:-1]:
        table.free(page)
    return value


def grow(table: PageTable, n: int) -> Optional[List[int]]:
    """n pages one by one; the caller frees them."""
    got: List[int] = []
    while len(got) < n:
        page = table.alloc()  # clean: near miss, freed when it runs short, else handed over
        if page is None:
            for p in got:
                table.free(p)
            return None
        got.append(page)
    return got


def beam(table: PageTable, width: int, depth: int, expand) -> List[List[int]]:
    """Each beam has `depth` pages. Beams that are not expanded end at once."""
    kept: List[List[int]] = []
    for b in range(width):
        pages = grow(table, depth)  # leak: a beam that expand() refuses is dropped with its pages
        if pages is None:
            break
        if expand(b, pages):
            kept.append(pages)
    return kept


def beam_best(table: PageTable, width: int, depth: int, score) -> Optional[List[int]]:
    best: Optional[List[int]] = None
    best_score = float("-inf")
    for b in range(width):
        pages = grow(table, depth)  # clean: near miss, the loser's pages are freed each time
        if pages is None:
            break
        value = score(b, pages)
        if value > best_score:
            best, pages, best_score = pages, best, value
        for page in pages or ():
            table.free(page)
    return best


class PrefixCache:
    """Pages of system prompts, shared by later sequences; the oldest prefix leaves when it is full."""

    def __init__(self, table: PageTable, capacity: int) -> None:
        self.table, self.capacity = table, capacity
        self._prefixes: "OrderedDict[tuple, List[int]]" = OrderedDict()

    def insert(self, tokens: List[int], pages: List[int]) -> None:
        key = tuple(tokens)
        if key in self._prefixes:
            return
        self._prefixes[key] = [self.table.share(p) for p in pages]  # clean: eviction and clear() free them
        while len(self._prefixes) > self.capacity:
            _, old = self._prefixes.popitem(last=False)
            for page in old:
                self.table.free(page)

    def lookup(self, tokens: List[int]) -> List[int]:
        """The pages are shared with the caller, who frees them."""
        pages = self._prefixes.get(tuple(tokens))
        if pages is None:
            return []
        self._prefixes.move_to_end(tuple(tokens))
        return [self.table.share(p) for p in pages]  # clean: handed to the caller

    def clear(self) -> None:
        for pages in self._prefixes.values():
            for page in pages:
                self.table.free(page)
        self._prefixes.clear()


class TaskPrefixCache:
    """One prefix a task; a new text replaces the old one."""

    def __init__(self, table: PageTable) -> None:
        self.table = table
        self._by_task: Dict[str, List[int]] = {}

    def install(self, task: str, tokens: List[int]) -> bool:
        pages = self.table.alloc_many(len(tokens) // PAGE + 1)  # leak: the old pages are overwritten
        if pages is None:
            return False
        self._by_task[task] = pages
        return True

    def clear(self) -> None:
        for pages in self._by_task.values():
            for page in pages:
                self.table.free(page)
        self._by_task.clear()


def prefix_hit_length(cache: PrefixCache, tokens: List[int]) -> int:
    pages = cache.lookup(tokens)  # leak: the shared pages are counted and not freed
    return len(pages) * PAGE


def prefill(cache: PrefixCache, table: PageTable, tokens: List[int], run) -> int:
    pages = cache.lookup(tokens)  # clean: freed after the run
    skipped = len(pages) * PAGE
    run(tokens[skipped:], pages)
    for page in pages:
        table.free(page)
    return skipped


def copy_on_write(table: PageTable, seq: Sequence, index: int, copy) -> bool:
    fresh = table.alloc()  # clean: near miss, replaces a page of the sequence that is freed
    if fresh is None:
        return False
    stale = seq.pages[index]
    copy(stale, fresh)
    seq.pages[index] = fresh
    table.free(stale)
    return True


def truncate(sampler: Sampler, sid: int, length: int) -> int:
    seq = sampler.live[sid]
    keep = (length + PAGE - 1) // PAGE
    removed, seq.pages = seq.pages[keep:], seq.pages[:keep]
    seq.tokens = seq.tokens[:length]
    for page in removed:
        sampler.table.free(page)
    return len(removed)


def speculative(table: PageTable, draft: List[int], verify) -> int:
    scratch = table.alloc()  # leak: the all-accepted return comes before the free
    if scratch is None:
        return 0
    accepted = 0
    for token in draft:
        if not verify(scratch, token):
            break
        accepted += 1
    else:
        return accepted
    table.free(scratch)
    return accepted
