"""Page tables for paged attention: fixed-size KV pages with reference counts and prefix sharing."""
from __future__ import annotations

import logging
from collections import OrderedDict, deque
from dataclasses import dataclass, field

log = logging.getLogger("serve.kv")
PAGE_TOKENS = 16


class OutOfPages(RuntimeError):
    pass


class PagePool:
    """Pages are plain integers; a page returns to the free list when its count reaches zero."""

    def __init__(self, n_pages: int) -> None:
        self._free: deque[int] = deque(range(n_pages))
        self._refs = [0] * n_pages

    def available(self) -> int:
        return len(self._free)

    def refs(self, page: int) -> int:
        return self._refs[page]

    def try_alloc(self) -> int | None:
        if not self._free:
            return None
        page = self._free.popleft()
        self._refs[page] = 1
        return page

    def alloc(self) -> int:
        page = self.try_alloc()  # clean: handed to the caller, None turns into an exception
        if page is None:
            raise OutOfPages("no free KV page")
        return page

    def share(self, page: int) -> int:
        self._refs[page] += 1
        return page

    def drop(self, page: int) -> None:
        self._refs[page] -= 1
        if self._refs[page] == 0:
            self._free.append(page)


@dataclass
class Sequence:
    seq_id: int
    prompt: list[int]
    pages: list[int] = field(default_factory=list)
    length: int = 0

    def pages_needed(self) -> int:
        return (len(self.prompt) + PAGE_TOKENS - 1) // PAGE_TOKENS


class BlockManager:
    def __init__(self, pool: PagePool, host: PagePool, watermark: int = 4) -> None:
        self.pool = pool
        self.host = host
        self.watermark = watermark
        self.tables: dict[int, Sequence] = {}
        self.prefix: OrderedDict[bytes, int] = OrderedDict()
        self.scratch: int | None = None

    # -- admission -----------------------------------------------------------------
    def admit(self, seq: Sequence) -> bool:
        got: list[int] = []
        for _ in range(seq.pages_needed()):
            page = self.pool.try_alloc()  # clean: rolled back when short, else moved into seq.pages
            if page is None:
                for p in got:
                    self.pool.drop(p)
                return False
            got.append(page)
        seq.pages.extend(got)
        seq.length = len(seq.prompt)
        self.tables[seq.seq_id] = seq
        return True

    def admit_speculative(self, target: Sequence, draft: Sequence) -> bool:
        first = self.pool.try_alloc()  # leak: the target page is not dropped when no draft page is left
        if first is None:
            return False
        second = self.pool.try_alloc()  # clean: stored in the draft sequence, dropped by finish
        if second is None:
            log.info("no draft page for %d, running without speculation later", target.seq_id)
            return False
        target.pages.append(first)
        draft.pages.append(second)
        self.tables[target.seq_id] = target
        self.tables[draft.seq_id] = draft
        return True

    def match_prefix(self, hashes: list[bytes]) -> list[int]:
        hits: list[int] = []
        for h in hashes:
            page = self.prefix.get(h)
            if page is None:
                break
            self.prefix.move_to_end(h)
            hits.append(self.pool.share(page))  # clean: the list of references is handed to the caller
        return hits

    def admit_cached(self, seq: Sequence, hashes: list[bytes]) -> bool:
        hits = self.match_prefix(hashes)  # leak: the shared pages stay referenced when admission is refused
        missing = seq.pages_needed() - len(hits)
        if missing > self.pool.available() - self.watermark:
            log.debug("seq %d refused, needs %d more pages", seq.seq_id, missing)
            return False
        seq.pages.extend(hits)
        for _ in range(missing):
            seq.pages.append(self.pool.alloc())  # clean: capacity was checked, pages end with the sequence
        self.tables[seq.seq_id] = seq
        return True

    def extend_cached(self, seq: Sequence, hashes: list[bytes]) -> int:
        hits = self.match_prefix(hashes)  # clean: near miss, surplus references are dropped, the rest moved
        room = seq.pages_needed() - len(seq.pages)
        for page in hits[room:]:
            self.pool.drop(page)
        kept = hits[:room]
        seq.pages += kept
        return len(kept) * PAGE_TOKENS

    def cached_tokens(self, hashes: list[bytes]) -> int:
        """Used by the router to pick the replica with the warmest cache."""
        return PAGE_TOKENS * len(self.match_prefix(hashes))  # leak: references only counted, never dropped

    # -- decoding --------------------------------------------------------------------
    def append_token(self, seq: Sequence) -> int:
        if seq.length % PAGE_TOKENS == 0:
            seq.pages.append(self.pool.alloc())  # clean: owned by the sequence, finish drops it
        seq.length += 1
        return seq.pages[-1]

    def make_writable(self, seq: Sequence, idx: int) -> int:
        page = seq.pages[idx]
        if self.pool.refs(page) == 1:
            return page
        fresh = self.pool.alloc()  # clean: takes the shared page's place in the table, which is dropped
        seq.pages[idx] = fresh
        self.pool.drop(page)
        return fresh

    def fork(self, parent_id: int, child_id: int) -> Sequence:
        parent = self.tables[parent_id]
        child = Sequence(child_id, list(parent.prompt), length=parent.length)
        for page in parent.pages:
            child.pages.append(self.pool.share(page))  # clean: near miss, the child is in tables, see finish
        self.tables[child_id] = child
        return child

    def begin_step(self, step: int) -> None:
        """The cascade kernel wants one page for partial sums in every step."""
        self.scratch = self.pool.alloc()  # leak: every step overwrites the page of the step before
        if step % 100 == 0:
            log.info("step %d free=%d", step, self.pool.available())

    def bind_args(self, seq: Sequence) -> tuple[list[int], int, int]:
        return seq.pages, seq.length, -1 if self.scratch is None else self.scratch

    def finish(self, seq_id: int) -> None:
        seq = self.tables.pop(seq_id, None)
        if seq is None:
            return
        for page in seq.pages:
            self.pool.drop(page)
        seq.pages.clear()

    # -- prefix cache ------------------------------------------------------------------
    def publish(self, seq: Sequence, hashes: list[bytes]) -> None:
        for h, page in zip(hashes, seq.pages):
            if h in self.prefix:
                continue
            self.prefix[h] = self.pool.share(page)  # clean: the cache's own reference, shrink drops it

    def shrink(self, keep: int) -> None:
        while len(self.prefix) > keep:
            _, page = self.prefix.popitem(last=False)
            self.pool.drop(page)

    # -- swapping ----------------------------------------------------------------------
    def plan_swap_out(self, seq: Sequence) -> list[tuple[int, int]]:
        plan: list[tuple[int, int]] = []
        for page in seq.pages:
            dst = self.host.try_alloc()  # leak: host pages planned so far are abandoned when it runs short
            if dst is None:
                log.warning("host pool short, seq %d stays on device", seq.seq_id)
                return []
            plan.append((page, dst))
        return plan

    def swap_out(self, seq_id: int) -> list[int]:
        seq = self.tables.pop(seq_id)
        plan = self.plan_swap_out(seq)  # clean: near miss, host pages go to the caller for swap_in
        if not plan:
            self.tables[seq_id] = seq
            return []
        for device, _ in plan:
            self.pool.drop(device)
        seq.pages.clear()
        return [h for _, h in plan]

    def swap_in(self, seq: Sequence, host_pages: list[int]) -> None:
        for h in host_pages:
            seq.pages.append(self.pool.alloc())  # clean: ends with the sequence, the host page is dropped
            self.host.drop(h)
        self.tables[seq.seq_id] = seq


def evict_idle(mgr: BlockManager, idle: list[int]) -> int:
    freed = 0
    for seq_id in idle:
        before = mgr.pool.available()
        mgr.swap_out(seq_id)  # leak: the list of host pages is discarded, nobody can drop them
        freed += mgr.pool.available() - before
    return freed
