"""Paged KV memory of the decode service: page ids, per-sequence tables, prefix sharing by reference count."""
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional, Tuple

import torch

PAGE = 16


class PageBook:
    def __init__(self, npages: int):
        self._free: Deque[int] = deque(range(npages))
        self._rc = [0] * npages

    @property
    def spare(self) -> int:
        return len(self._free)

    def mint(self) -> Optional[int]:
        if not self._free:
            return None
        p = self._free.popleft()  # clean: returned with count one
        self._rc[p] = 1
        return p

    def share(self, p: int) -> int:
        self._rc[p] += 1
        return p

    def burn(self, p: int) -> None:
        self._rc[p] -= 1
        if self._rc[p] == 0:
            self._free.append(p)

    def mint_run(self, n: int) -> Optional[List[int]]:
        run: List[int] = []
        for _ in range(n):
            p = self.mint()  # leak: pages minted before exhaustion are not burned
            if p is None:
                return None
            run.append(p)
        return run

    def mint_checked(self, n: int) -> Optional[List[int]]:
        if self.spare < n:
            return None
        return [self.mint() for _ in range(n)]  # clean: near miss, spare was checked so the list is complete

    def unshare(self, p: int) -> Optional[int]:
        """Private copy for a write; gives up one count of p."""
        if self._rc[p] == 1:
            return p
        q = self.mint()  # clean: returned in place of p
        if q is None:
            return None
        self.burn(p)
        return q


@dataclass
class Seq:
    sid: int
    tokens: List[int]
    table: List[int] = field(default_factory=list)
    swapped: bool = False


class Scheduler:
    def __init__(self, book: PageBook, kv: torch.Tensor):
        self.book = book
        self.kv = kv
        self.live: Dict[int, Seq] = {}
        self.waiting: Deque[Seq] = deque()
        self.prefix: Dict[Tuple[int, ...], int] = {}
        self.hot: Dict[Tuple[int, ...], int] = {}

    def admit(self, seq: Seq) -> bool:
        need = (len(seq.tokens) + PAGE - 1) // PAGE
        pages = self.book.mint_checked(need)  # clean: moved into seq.table, finish() burns it
        if pages is None:
            self.waiting.append(seq)
            return False
        seq.table = pages
        self.live[seq.sid] = seq
        return True

    def admit_limited(self, seq: Seq, max_pages: int) -> bool:
        need = (len(seq.tokens) + PAGE - 1) // PAGE
        pages = self.book.mint_checked(need)  # leak: sequence over max_pages is refused after its pages were minted
        if pages is None:
            return False
        if len(pages) > max_pages:
            self.waiting.append(seq)
            return False
        seq.table.extend(pages)
        self.live[seq.sid] = seq
        return True

    def finish(self, sid: int) -> None:
        seq = self.live.pop(sid)
        for p in seq.table:
            self.book.burn(p)
        seq.table.clear()

    def append_token(self, sid: int, tok: int) -> bool:
        seq = self.live[sid]
        if len(seq.tokens) % PAGE == 0:
            p = self.book.mint()  # clean: appended to the table
            if p is None:
                return False
            seq.table.append(p)
        seq.tokens.append(tok)
        return True

    def append_spec(self, sid: int, draft: List[int], accepted: int) -> bool:
        seq = self.live[sid]
        extra = self.book.mint()  # leak: nothing accepted returns without burning or keeping extra
        if extra is None:
            return False
        if accepted == 0:
            return True
        seq.tokens.extend(draft[:accepted])
        seq.table.append(extra)
        return True

    def verify_draft(self, sid: int, draft: List[int], accepted: int) -> int:
        seq = self.live[sid]
        extra = self.book.mint()  # clean: near miss, burned or appended depending on accepted
        if extra is None:
            return 0
        keep = accepted > 0
        if keep:
            seq.tokens.extend(draft[:accepted])
            seq.table.append(extra)
        if not keep:
            self.book.burn(extra)
        return accepted

    def fork(self, sid: int, new_sid: int) -> Seq:
        src = self.live[sid]
        child = Seq(new_sid, list(src.tokens))
        for p in src.table:
            child.table.append(self.book.share(p))  # clean: count is kept by child's table
        self.live[new_sid] = child
        return child

    def fork_last(self, sid: int, new_sid: int) -> Optional[Seq]:
        src = self.live[sid]
        shared = [self.book.share(p) for p in src.table[:-1]]  # leak: counts taken stay raised when no private page is left
        own = self.book.mint()  # clean: goes into the child's table
        if own is None:
            return None
        self.kv[own].copy_(self.kv[src.table[-1]])
        child = Seq(new_sid, list(src.tokens), shared + [own])
        self.live[new_sid] = child
        return child

    def remember_prefix(self, seq: Seq) -> None:
        key = tuple(seq.tokens[:PAGE])
        if len(key) < PAGE or key in self.prefix:
            return
        self.prefix[key] = self.book.share(seq.table[0])  # clean: near miss, kept in prefix, forget_prefixes() burns it

    def refresh_prefix(self, seq: Seq) -> None:
        key = tuple(seq.tokens[:PAGE])
        self.hot[key] = self.book.share(seq.table[0])  # leak: count of the page stored before under key is lost

    def forget_prefixes(self) -> None:
        while self.prefix:
            _, p = self.prefix.popitem()
            self.book.burn(p)
        for p in self.hot.values():
            self.book.burn(p)
        self.hot.clear()

    def write_page(self, sid: int, i: int, data: torch.Tensor) -> bool:
        seq = self.live[sid]
        p = self.book.unshare(seq.table[i])  # clean: near miss, replaces the count of table[i]
        if p is None:
            return False
        seq.table[i] = p
        self.kv[p].copy_(data)
        return True

    def swap_out(self, sid: int, host: Dict[int, torch.Tensor]) -> None:
        seq = self.live.pop(sid)
        host[sid] = self.kv[seq.table].cpu()
        while seq.table:
            self.book.burn(seq.table.pop())
        seq.swapped = True
        self.waiting.append(seq)

    def swap_in(self, host: Dict[int, torch.Tensor]) -> Optional[Seq]:
        if not self.waiting:
            return None
        seq = self.waiting.popleft()
        saved = host.get(seq.sid)
        pages = self.book.mint_checked(0 if saved is None else saved.shape[0])  # clean: put into the table, or nothing was minted
        if pages is None:
            self.waiting.appendleft(seq)
            return None
        if saved is not None:
            self.kv[pages] = saved
        seq.table = pages
        seq.swapped = False
        self.live[seq.sid] = seq
        return seq

    def preempt_last(self) -> None:
        sid = next(reversed(self.live))
        seq = self.live.pop(sid)  # leak: table is replaced by an empty list, its pages are never burned
        seq.table = []
        self.waiting.appendleft(seq)
