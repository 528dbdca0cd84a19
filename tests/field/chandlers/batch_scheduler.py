"""Continuous batching: running slots, KV pages and encoder budget per step."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import Deque, Dict, List, Optional


class Status(IntEnum):
    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    DONE = auto()


class PageAllocator:
    def __init__(self, num_pages: int) -> None:
        self._free: Deque[int] = deque(range(num_pages))

    def available(self) -> int:
        return len(self._free)

    def alloc_pages(self, n: int) -> Optional[List[int]]:
        if n > len(self._free):
            return None
        return [self._free.popleft() for _ in range(n)]

    def free_pages(self, pages: List[int]) -> None:
        self._free.extend(pages)


class SlotTable:
    def __init__(self, max_batch: int) -> None:
        self._vacant = list(reversed(range(max_batch)))

    def occupy(self) -> int:
        return self._vacant.pop() if self._vacant else -1

    def vacate(self, slot: int) -> None:
        self._vacant.append(slot)


class EncoderBudget:
    def __init__(self, tokens: int) -> None:
        self.left = tokens

    def charge(self, n: int) -> bool:
        if n > self.left:
            return False
        self.left -= n
        return True

    def refund(self, n: int) -> None:
        self.left += n


@dataclass
class Seq:
    seq_id: int
    prompt_len: int
    image_tokens: int = 0
    status: Status = Status.WAITING
    pages: List[int] = field(default_factory=list)
    draft_pages: List[int] = field(default_factory=list)
    slot: int = -1


class Scheduler:
    def __init__(self, pages: PageAllocator, slots: SlotTable, budget: EncoderBudget, page_size: int = 16) -> None:
        self.pages = pages
        self.slots = slots
        self.budget = budget
        self.page_size = page_size
        self.waiting: Deque[Seq] = deque()
        self.running: Dict[int, Seq] = {}

    def _need(self, seq: Seq) -> int:
        return (seq.prompt_len + self.page_size - 1) // self.page_size

    def admit(self) -> List[Seq]:
        admitted: List[Seq] = []
        while self.waiting:
            seq = self.waiting[0]
            slot = self.slots.occupy()  # leak: abort() frees the pages of a running sequence and not its slot
            if slot < 0:
                break
            pages = self.pages.alloc_pages(self._need(seq))  # clean: near miss, kept in seq.pages, which finish, abort and preempt all free
            if pages is None:
                self.slots.vacate(slot)
                break
            self.waiting.popleft()
            seq.slot, seq.pages, seq.status = slot, pages, Status.RUNNING
            self.running[seq.seq_id] = seq
            admitted.append(seq)
        return admitted

    def append_token(self, seq: Seq) -> bool:
        seq.prompt_len += 1
        if self._need(seq) <= len(seq.pages):
            return True
        extra = self.pages.alloc_pages(1)  # clean: near miss, joined to seq.pages
        if extra is None:
            return False
        seq.pages.extend(extra)
        return True

    def speculate(self, seq: Seq, n: int) -> bool:
        if seq.draft_pages:
            return True
        got = self.pages.alloc_pages(n)  # leak: preempt() clears draft_pages without freeing them
        if got is None:
            return False
        seq.draft_pages = got
        return True

    def finish(self, seq: Seq) -> None:
        self.running.pop(seq.seq_id, None)
        self.pages.free_pages(seq.pages + seq.draft_pages)
        if seq.slot >= 0:
            self.slots.vacate(seq.slot)
        seq.pages, seq.draft_pages, seq.slot = [], [], -1
        seq.status = Status.DONE

    def abort(self, seq_id: int) -> None:
        seq = self.running.pop(seq_id, None)
        if seq is None:
            self.waiting = deque(s for s in self.waiting if s.seq_id != seq_id)
            return
        self.pages.free_pages(seq.pages + seq.draft_pages)
        seq.pages, seq.draft_pages = [], []
        seq.status = Status.DONE

    def preempt(self, seq: Seq) -> None:
        del self.running[seq.seq_id]
        self.pages.free_pages(seq.pages)
        if seq.slot >= 0:
            self.slots.vacate(seq.slot)
        seq.pages, seq.slot = [], -1
        seq.draft_pages.clear()
        seq.status = Status.PREEMPTED
        self.waiting.appendleft(seq)

    def encode_step(self, seqs: List[Seq]) -> List[int]:
        encoded: List[int] = []
        for seq in seqs:
            if not self.budget.charge(seq.image_tokens):  # clean: refunded at the end of the turn
                break
            if seq.status is Status.RUNNING:
                encoded.append(seq.seq_id)
            self.budget.refund(seq.image_tokens)
        return encoded

    def encode_chunked(self, seq: Seq, chunk: int) -> int:
        done = 0
        while done < seq.image_tokens:
            n = min(chunk, seq.image_tokens - done)
            if not self.budget.charge(n):  # leak: a sequence found stopped returns with the chunk's charge not refunded
                break
            done += n
            if seq.status is not Status.RUNNING:
                return done
            self.budget.refund(n)
        return done

    def dry_run(self, seq: Seq) -> bool:
        slot = self.slots.occupy()  # clean: near miss, vacated both ways
        if slot < 0:
            return False
        probe = self.pages.alloc_pages(self._need(seq))  # clean: near miss, freed unless None
        self.slots.vacate(slot)
        if probe is None:
            return False
        self.pages.free_pages(probe)
        return True

    def reserve_pair(self, a: Seq, b: Seq) -> bool:
        left = self.pages.alloc_pages(self._need(a))  # leak: when the partner does not fit, the first pages stay taken
        if left is None:
            return False
        right = self.pages.alloc_pages(self._need(b))  # clean: becomes b.pages
        if right is None:
            return False
        a.pages.extend(left)
        b.pages.extend(right)
        self.running[a.seq_id] = a
        self.running[b.seq_id] = b
        return True

    def defrag(self, seq: Seq) -> None:
        fresh = self.pages.alloc_pages(len(seq.pages))  # clean: near miss, the former pages are freed when they are swapped
        if fresh is None:
            return
        stale, seq.pages = seq.pages, fresh
        self.pages.free_pages(stale)
