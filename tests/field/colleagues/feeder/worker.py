"""Collation threads: buffers travel through queues to the device copier."""
from __future__ import annotations
import queue
import threading
from dataclasses import dataclass
from typing import Optional

import torch

from .pins import BufferSource

STOP = object()

@dataclass
class Batch:
    buf: torch.Tensor
    rows: int
    labels: Optional[torch.Tensor] = None
    def retire(self, src: BufferSource) -> None:
        src.putback(self.buf)
        if self.labels is not None:
            src.putback(self.labels)

class Collator:
    def __init__(self, src: BufferSource, width: int) -> None:
        self.src, self.width = src, width
    def plain(self, rows: list[torch.Tensor]) -> Optional[Batch]:
        buf = self.src.checkout(len(rows) * self.width)  # clean: moves into Batch for the caller
        if buf is None:
            return None
        for i, r in enumerate(rows):
            buf[i * self.width: i * self.width + r.numel()] = r
        return Batch(buf, len(rows))
    def labelled(self, rows: list[torch.Tensor]) -> Optional[Batch]:
        batch = self.plain(rows)  # leak: no buffer for labels returns None with batch held
        if batch is None:
            return None
        batch.labels = self.src.checkout(len(rows))  # clean: near miss, Batch.retire puts labels back
        if batch.labels is None:
            return None
        batch.labels[: len(rows)] = torch.tensor([float(r[0]) for r in rows])
        return batch
    def labelled_or_plain(self, rows: list[torch.Tensor], want: bool) -> Optional[Batch]:
        batch = self.plain(rows)  # clean: near miss, returned with or without labels
        if batch is not None and want:
            batch.labels = self.src.checkout(len(rows))  # clean: retire() puts labels back, None tolerated
        return batch

class FeederThread(threading.Thread):
    def __init__(self, coll: Collator, inbox: queue.Queue, outbox: "queue.Queue[Batch]") -> None:
        super().__init__(daemon=True)
        self.coll, self.inbox, self.outbox = coll, inbox, outbox
        self.dropped = 0
    def run(self) -> None:
        while (rows := self.inbox.get()) is not STOP:
            batch = self.coll.plain(rows)  # leak: full outbox is counted and the batch forgotten
            if batch is None:
                continue
            try:
                self.outbox.put(batch, timeout=10)
            except queue.Full:
                self.dropped += 1

class PatientFeeder(FeederThread):
    def run(self) -> None:
        while (rows := self.inbox.get()) is not STOP:
            batch = self.coll.labelled_or_plain(rows, True)  # clean: near miss, queue owns it, Full retires
            if batch is None:
                continue
            try:
                self.outbox.put(batch, timeout=10)
            except queue.Full:
                batch.retire(self.coll.src)
                self.dropped += 1

def drain(outbox: "queue.Queue[Batch]", src: BufferSource) -> int:
    n = 0
    while not outbox.empty():
        outbox.get().retire(src)
        n += 1
    return n

def eval_once(coll: Collator, rows: list[torch.Tensor], model) -> Optional[torch.Tensor]:
    batch = coll.labelled_or_plain(rows, want=True)  # leak: only buf is put back, labels forgotten
    if batch is None:
        return None
    x = batch.buf[: batch.rows * coll.width].view(batch.rows, -1).cuda()
    coll.src.putback(batch.buf)
    return model(x)

def warm(coll: Collator, model) -> bool:
    batch = coll.plain([torch.ones(coll.width)])  # clean: retired before the result is returned
    if batch is None:
        return False
    y = model(batch.buf[: coll.width].cuda())
    batch.retire(coll.src)
    return bool(torch.isfinite(y).all())

def scratch_sum(src: BufferSource, xs: list[torch.Tensor]) -> float:
    total = 0.0
    for x in xs:
        t = src.checkout(x.numel())  # leak: empty x breaks while t is out
        if t is None or not x.numel():
            break
        t[: x.numel()].copy_(x)
        total += float(t[: x.numel()].sum())
        src.putback(t)
    return total
