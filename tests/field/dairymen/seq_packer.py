"""Packing documents into fixed-length training sequences.

Tokens are copied once into Pages (rows of one int32 array).  A Sequence is a
list of Segments over pages; the Collator makes a batch of some of them.
"""

from __future__ import annotations

import heapq
import logging
from dataclasses import dataclass, field
from typing import Iterable, Iterator, Optional

import numpy as np

log = logging.getLogger(__name__)

PAD = 0


class ArenaFull(MemoryError):
    pass


class BadDocument(ValueError):
    pass


@dataclass(order=True)
class Page:
    number: int
    fill: int = field(default=0, compare=False)

    def room(self, width: int) -> int:
        return width - self.fill


@dataclass
class Arena:
    pages: int
    width: int
    data: np.ndarray = field(init=False)
    vacant: list[Page] = field(init=False)

    def __post_init__(self) -> None:
        self.data = np.full((self.pages, self.width), PAD, dtype=np.int32)
        self.vacant = [Page(i) for i in range(self.pages)]
        heapq.heapify(self.vacant)

    def claim(self) -> Page:
        if not self.vacant:
            raise ArenaFull(f"{self.pages} pages in use")
        page = heapq.heappop(self.vacant)  # clean: handed to the caller
        page.fill = 0
        return page

    def claim_upto(self, n: int) -> list[Page]:
        """As many pages as there are, at most n."""
        got = []
        while self.vacant and len(got) < n:
            got.append(heapq.heappop(self.vacant))  # clean: returned in the list
        for page in got:
            page.fill = 0
        return got

    def vacate(self, page: Page) -> None:
        self.data[page.number, :] = PAD
        heapq.heappush(self.vacant, page)

    def put(self, page: Page, tokens: np.ndarray) -> slice:
        if len(tokens) > page.room(self.width):
            raise BadDocument(f"{len(tokens)} tokens for {page.room(self.width)} places")
        where = slice(page.fill, page.fill + len(tokens))
        self.data[page.number, where] = tokens
        page.fill += len(tokens)
        return where

    def defragment(self) -> None:
        low, high = [], []
        while self.vacant:
            page = heapq.heappop(self.vacant)  # leak: pages of the upper half are collected in high, which is not merged back
            if page.number < self.pages // 2:
                low.append(page)
            else:
                high.append(page)
        self.vacant = low
        heapq.heapify(self.vacant)
        log.debug("%d high pages", len(high))


@dataclass
class Segment:
    page: Page
    where: slice
    doc: int


@dataclass
class Sequence:
    arena: Arena
    length: int
    segments: list[Segment] = field(default_factory=list)
    used: int = 0

    def room(self) -> int:
        return self.length - self.used

    def attach(self, seg: Segment) -> None:
        n = seg.where.stop - seg.where.start
        if n > self.room():
            raise BadDocument(f"segment of {n} into {self.room()}")
        self.segments.append(seg)
        self.used += n

    def tokens(self) -> np.ndarray:
        row = np.full(self.length, PAD, dtype=np.int32)
        at = 0
        for s in self.segments:
            n = s.where.stop - s.where.start
            row[at:at + n] = self.arena.data[s.page.number, s.where]
            at += n
        return row

    def discard(self) -> None:
        for seg in self.segments:
            self.arena.vacate(seg.page)
        self.segments.clear()
        self.used = 0


class FirstFit:
    """Keeps some sequences open and places each document in the first that has room."""

    def __init__(self, arena: Arena, length: int, open_max: int = 8):
        self.arena = arena
        self.length = length
        self.open_max = open_max
        self.open: list[Sequence] = []
        self.dropped = 0

    def add(self, doc: int, tokens: np.ndarray) -> Optional[Sequence]:
        """Place one document; returns a sequence when one had to be closed."""
        page = self.arena.claim()  # leak: a document longer than a page raises BadDocument in put(), pack() counts it and goes on
        where = self.arena.put(page, tokens)
        seg = Segment(page, where, doc)
        for seq in self.open:
            if seq.room() >= len(tokens):
                seq.attach(seg)
                return None
        fresh = Sequence(self.arena, max(self.length, len(tokens)))
        fresh.attach(seg)
        self.open.append(fresh)
        if len(self.open) > self.open_max:
            fullest = min(self.open, key=lambda s: s.room())
            self.open.remove(fullest)
            return fullest
        return None


def pack(docs: Iterable[tuple[int, np.ndarray]], packer: FirstFit) -> Iterator[Sequence]:
    for doc, tokens in docs:
        try:
            done = packer.add(doc, tokens)
        except BadDocument as exc:
            packer.dropped += 1
            log.info("document %d: %s", doc, exc)
            continue
        if done is not None:
            yield done
    while packer.open:
        yield packer.open.pop()


def pack_long(doc: int, tokens: np.ndarray, arena: Arena, length: int) -> list[Sequence]:
    """One document over several sequences, a page for each."""
    out: list[Sequence] = []
    step = min(length, arena.width)
    try:
        for at in range(0, len(tokens), step):
            page = arena.claim()  # clean: near miss, put() cannot refuse a piece of at most a page and the handler discards all of out
            seq = Sequence(arena, length)
            seq.attach(Segment(page, arena.put(page, tokens[at:at + step]), doc))
            out.append(seq)
    except ArenaFull:
        for seq in out:
            seq.discard()
        return []
    return out


def pack_pairs(pairs: Iterable[tuple[np.ndarray, np.ndarray]], arena: Arena, length: int) -> Iterator[Sequence]:
    """Prompt and answer in two pages of one sequence."""
    for n, (prompt, answer) in enumerate(pairs):
        seq = Sequence(arena, length)
        try:
            p = arena.claim()  # clean: near miss, attached to seq before anything else can fail, discarded with it
            seq.attach(Segment(p, slice(0, 0), n))
            where = arena.put(p, prompt)
            seq.segments[-1].where = where
            seq.used = len(prompt)
            a = arena.claim()  # leak: put() or attach() raise BadDocument for a long answer before the page belongs to seq
            seq.attach(Segment(a, arena.put(a, answer), n))
        except BadDocument as exc:
            log.info("pair %d: %s", n, exc)
            seq.discard()
            continue
        except ArenaFull:
            seq.discard()
            return
        yield seq


@dataclass
class Collator:
    arena: Arena
    batch: int
    scratch: Optional[Page] = None

    def __call__(self, seqs: list[Sequence]) -> np.ndarray:
        rows = np.stack([s.tokens() for s in seqs])
        for s in seqs:
            s.discard()
        return rows

    def position_ids(self, seq: Sequence) -> np.ndarray:
        if self.scratch is None:
            self.scratch = self.arena.claim()  # clean: near miss, claimed once by the None-check and vacated in close()
        row = self.arena.data[self.scratch.number]
        sizes = [seg.where.stop - seg.where.start for seg in seq.segments]
        row[:sum(sizes)] = np.concatenate([np.arange(n) for n in sizes])
        return row[:sum(sizes)].copy()

    def histogram(self, seqs: list[Sequence]) -> Optional[np.ndarray]:
        pages = self.arena.claim_upto(2)  # leak: a single page is not enough for the work and is kept when None is returned
        if len(pages) < 2:
            return None
        lens = self.arena.data[pages[0].number, :len(seqs)]
        lens[:] = [s.used for s in seqs][:len(lens)]
        hist = np.bincount(lens // 128)
        for page in pages:
            self.arena.vacate(page)
        return hist

    def close(self) -> None:
        if self.scratch is not None:
            self.arena.vacate(self.scratch)
            self.scratch = None


def first_tokens(arena: Arena, docs: Iterable[np.ndarray], n: int) -> np.ndarray:
    """Statistics over document starts."""
    rows = []
    for doc in docs:
        page = arena.claim()  # leak: an empty document continues with the next claim and the page is not vacated
        if len(doc) == 0:
            continue
        arena.put(page, doc[:min(n, arena.width)])
        rows.append(arena.data[page.number, :n].copy())
        arena.vacate(page)
    return np.stack(rows) if rows else np.empty((0, n), dtype=np.int32)
