"""Decode engine: preallocate, receive KV, run, finish."""
from collections import deque

from .pages import PageTable, ReceiveSlots
from .sequence import Sequence


class DecodeEngine:
    def __init__(self, table: PageTable, slots: ReceiveSlots, page_tokens: int) -> None:
        self.table, self.slots, self.page_tokens = table, slots, page_tokens
        self.prealloc: deque[Sequence] = deque()
        self.running: dict[str, Sequence] = {}

    def preallocate(self, seq: Sequence, hit: list[int]) -> bool:
        """The leading pages are a local prefix hit; only the rest is received."""
        shared = [self.table.bump(page) for page in hit]  # leak: without a receive slot the bumped hit stays
        slot = self.slots.register()  # clean: near miss, deregistered without spare pages, else scrap()
        if slot is None:
            return False
        need = -(-seq.length // self.page_tokens) - len(hit)
        if self.table.spare() < need:
            self.slots.deregister(slot)
            self.table.put_pages(shared)
            return False
        seq.pages = shared + self.table.pop_pages(need)  # clean: near miss, spare() was checked, scrap() puts them
        seq.slot = slot
        self.prealloc.append(seq)
        return True

    def poll(self, transfer) -> None:
        for _ in range(len(self.prealloc)):
            seq = self.prealloc.popleft()
            state = transfer.state(seq.rid)
            if state == "done":
                self.slots.deregister(seq.slot)
                seq.slot = None
                self.running[seq.rid] = seq
            elif state == "failed":
                seq.scrap(self.table, self.slots)
            else:
                self.prealloc.append(seq)

    def grow(self, rid: str) -> bool:
        seq = self.running[rid]
        crosses = seq.length % self.page_tokens == 0
        page = self.table.pop_page() if crosses else None  # clean: near miss, appended under the same condition
        if crosses:
            if page is None:
                return False
            seq.pages.append(page)
        seq.length += 1
        return True

    def grow_all(self) -> list[str]:
        stalled = []
        for rid, seq in self.running.items():
            page = self.table.pop_page()  # leak: sequences not at a boundary drop the page
            if page is None:
                stalled.append(rid)
                continue
            if seq.length % self.page_tokens == 0:
                seq.pages.append(page)
            seq.length += 1
        return stalled

    def beam(self, rid: str, width: int) -> None:
        parent = self.running[rid]
        for i in range(width):
            if f"{rid}.{i}" in self.running:
                continue
            child = Sequence(f"{rid}.{i}", parent.length)
            child.inherit(parent, self.table)  # clean: child goes into running, finish() scraps it
            self.running[child.rid] = child

    def finish(self, rid: str) -> None:
        self.running.pop(rid).scrap(self.table, self.slots)

    def drain(self) -> None:
        for rid in list(self.running):
            self.finish(rid)
        while self.prealloc:
            self.prealloc.popleft().scrap(self.table, self.slots)
