"""Greedy sequence packing.

A `Bin` is one row of the packed batch. Bins come from a `BinYard`, are filled with
documents of varying length and leave as part of a `PackedBatch`, whose `release()`
hands all rows back.
"""
import bisect
from dataclasses import dataclass, field
from typing import Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import torch


@dataclass(eq=False)
class Bin:
    row: int
    tokens: torch.Tensor
    segment_ids: torch.Tensor
    fill: int = 0
    docs: int = 0

    @property
    def left(self) -> int:
        return self.tokens.numel() - self.fill

    def add(self, doc: torch.Tensor) -> None:
        n = doc.numel()
        self.tokens[self.fill : self.fill + n] = doc
        self.docs += 1
        self.segment_ids[self.fill : self.fill + n] = self.docs
        self.fill += n

    def wipe(self) -> None:
        self.tokens.zero_()
        self.segment_ids.zero_()
        self.fill = self.docs = 0


class BinYard:
    def __init__(self, rows: int, seqlen: int):
        self.seqlen = seqlen
        tok = torch.zeros(rows, seqlen, dtype=torch.int64)
        seg = torch.zeros(rows, seqlen, dtype=torch.int32)
        self._parked: Dict[int, Bin] = {r: Bin(r, tok[r], seg[r]) for r in range(rows)}

    def open_bin(self) -> Optional[Bin]:
        if not self._parked:
            return None
        _, b = self._parked.popitem()  # clean: returned to the packer
        return b

    def retire(self, b: Bin) -> None:
        b.wipe()
        self._parked[b.row] = b


@dataclass
class PackedBatch:
    yard: BinYard
    bins: List[Bin] = field(default_factory=list)

    def stack(self) -> Tuple[torch.Tensor, torch.Tensor]:
        return torch.stack([b.tokens for b in self.bins]), torch.stack([b.segment_ids for b in self.bins])

    def release(self) -> None:
        for b in self.bins:
            self.yard.retire(b)
        self.bins.clear()


class BestFitPacker:
    def __init__(self, yard: BinYard, rows: int, min_fill: float = 0.5):
        self.yard = yard
        self.rows = rows
        self.min_fill = min_fill
        self._open: List[Bin] = []  # sorted by room left
        self._spill: Optional[Bin] = None

    def _insert(self, b: Bin) -> None:
        bisect.insort(self._open, b, key=lambda x: x.left)

    def offer(self, doc: torch.Tensor) -> bool:
        i = bisect.bisect_left(self._open, doc.numel(), key=lambda x: x.left)
        if i < len(self._open):
            b = self._open.pop(i)
        else:
            b = self.yard.open_bin()  # clean: near miss, None returns, any bin is put into the open list
            if b is None:
                return False
        b.add(doc)
        self._insert(b)
        return True

    def offer_long(self, doc: torch.Tensor) -> bool:
        """Documents longer than the context are truncated into a bin of their own."""
        b = self.yard.open_bin()  # leak: an all-padding document returns with the bin neither inserted nor retired
        if b is None:
            return False
        doc = doc[: self.yard.seqlen]
        if not bool((doc != 0).any()):
            return True
        b.add(doc)
        self._insert(b)
        return True

    def spill(self, doc: torch.Tensor) -> None:
        """Tail pieces share one bin that is carried over between batches."""
        if self._spill is None or self._spill.left < doc.numel():
            self._spill = self.yard.open_bin()  # leak: a nearly full spill bin is replaced without being retired or emitted
        if self._spill is not None:
            self._spill.add(doc)

    def emit(self) -> PackedBatch:
        batch = PackedBatch(self.yard)
        keep: List[Bin] = []
        for b in self._open:
            if b.fill >= self.min_fill * self.yard.seqlen and len(batch.bins) < self.rows:
                batch.bins.append(b)
            else:
                keep.append(b)
        self._open = keep
        if self._spill is not None and len(batch.bins) < self.rows:
            batch.bins.append(self._spill)
            self._spill = None
        return batch

    def reset(self) -> None:
        while self._open:
            self.yard.retire(self._open.pop())
        if self._spill is not None:
            self.yard.retire(self._spill)
            self._spill = None


def pack_stream(docs: Iterable[torch.Tensor], yard: BinYard, rows: int) -> Iterator[PackedBatch]:
    """First-fit over a stream; the consumer releases every batch."""
    batch = PackedBatch(yard)
    for doc in docs:
        doc = doc[: yard.seqlen]
        home = next((b for b in batch.bins if b.left >= doc.numel()), None)
        if home is None:
            if len(batch.bins) == rows:
                yield batch
                batch = PackedBatch(yard)
            home = yard.open_bin()  # clean: near miss, appended to the batch, which is yielded
            if home is None:
                break
            batch.bins.append(home)
        home.add(doc)
    yield batch


def train_epoch(docs: Sequence[torch.Tensor], yard: BinYard, rows: int, step) -> float:
    total = 0.0
    for batch in pack_stream(docs, yard, rows):  # clean: each batch is released at the bottom
        if batch.bins:
            tokens, segments = batch.stack()
            total += step(tokens, segments)
        batch.release()
    return total


def count_rows(docs: Sequence[torch.Tensor], yard: BinYard, rows: int) -> int:
    """How many packed rows an epoch will take."""
    n = 0
    for batch in pack_stream(docs, yard, rows):  # leak: batches are counted and dropped without release
        n += len(batch.bins)
    return n


def first_batch(docs: Sequence[torch.Tensor], yard: BinYard, rows: int) -> Optional[PackedBatch]:
    for batch in pack_stream(docs, yard, rows):  # clean: near miss, an empty batch has no bins, otherwise the caller gets it
        if batch.bins:
            return batch
    return None


def debug_print(docs: Sequence[torch.Tensor], yard: BinYard) -> None:
    batch = first_batch(docs, yard, 4)  # clean: near miss, None is the only early return
    if batch is None:
        return
    for b in batch.bins:
        print(f"row {b.row}: {b.docs} docs, {b.fill}/{yard.seqlen}")
    batch.release()


def shift_labels(yard: BinYard, tokens: torch.Tensor) -> torch.Tensor:
    tmp = yard.open_bin()  # leak: the copy is returned but the bin is never retired
    if tmp is None:
        return torch.roll(tokens, -1)
    tmp.add(tokens[1:])
    return tmp.tokens.clone()
