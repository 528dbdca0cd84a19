import queue
import threading
from collections import namedtuple

import torch
from torch.utils.data import Dataset

Batch = namedtuple("Batch", "ids buf length")


class RingSlots(object):
    """Ring of preallocated token buffers shared between loader threads and the trainer."""

    def __init__(self, depth, batch, seqlen):
        self.data = torch.zeros(depth, batch, seqlen, dtype=torch.long)
        self._free = queue.Queue()
        for i in range(depth):
            self._free.put(i)

    def take(self, timeout=None):
        try:
            return self._free.get(timeout=timeout)  # clean: given to the caller of take
        except queue.Empty:
            return None

    def return_(self, slot):
        self._free.put(slot)


class PrefetchLoader(object):
    def __init__(self, dataset: Dataset, slots: RingSlots, batch_size=8, depth=4, drop_short=True):
        self.ds = dataset
        self.slots = slots
        self.bs = batch_size
        self.drop_short = drop_short
        self.ready = queue.Queue(maxsize=depth)
        self.stop_flag = threading.Event()

    def _producer(self):
        for start in range(0, len(self.ds), self.bs):
            if self.stop_flag.is_set():
                break
            slot = self.slots.take()  # clean: travels through the ready queue, the consumer returns it
            if slot is None:
                continue
            n = self._fill(slot, start)
            self.ready.put(Batch(range(start, start + n), slot, n))
        self.ready.put(None)

    def _producer_filtered(self):
        for start in range(0, len(self.ds), self.bs):
            slot = self.slots.take()  # leak: short batches are skipped with the slot still taken
            if slot is None:
                break
            n = self._fill(slot, start)
            if n < self.bs and self.drop_short:
                continue
            self.ready.put(Batch(range(start, start + n), slot, n))
        self.ready.put(None)

    def _producer_strict(self):
        for start in range(0, len(self.ds), self.bs):
            slot = self.slots.take()  # clean: near miss, the skip returns the slot first
            if slot is None:
                break
            n = self._fill(slot, start)
            if n < self.bs:
                self.slots.return_(slot)
                continue
            self.ready.put(Batch(range(start, start + n), slot, n))
        self.ready.put(None)

    def _fill(self, slot, start):
        n = 0
        for j in range(start, min(start + self.bs, len(self.ds))):
            row = self.ds[j]
            self.slots.data[slot, n, : len(row)] = row
            n += 1
        return n

    def __iter__(self):
        t = threading.Thread(target=self._producer, daemon=True)
        t.start()
        while True:
            b = self.ready.get()
            if b is None:
                return
            out = self.slots.data[b.buf, : b.length].clone()
            self.slots.return_(b.buf)
            yield out

    def drain(self):
        while True:
            try:
                b = self.ready.get_nowait()
            except queue.Empty:
                return
            if b is not None:
                self.slots.return_(b.buf)


def preview(loader, index):
    slot = loader.slots.take()  # leak: the preview tensor is cloned and the slot never returned
    if slot is None:
        return None
    loader._fill(slot, index)
    return loader.slots.data[slot].clone()


def preview_view(loader, index):
    slot = loader.slots.take()  # clean: handed to the caller with its view
    if slot is None:
        return None, None
    loader._fill(slot, index)
    return slot, loader.slots.data[slot]


def token_histogram(loader, vocab, starts):
    hist = torch.zeros(vocab, dtype=torch.long)
    for s in starts:
        slot, view = preview_view(loader, s)  # clean: returned at the end of each round
        if slot is None:
            break
        hist += torch.bincount(view.view(-1), minlength=vocab)
        loader.slots.return_(slot)
    return hist


def longest_row(loader, starts, pad=0):
    best = 0
    for s in starts:
        slot, view = preview_view(loader, s)  # leak: the break on a full row keeps the slot
        if slot is None:
            break
        lens = (view != pad).sum(dim=1)
        best = max(best, int(lens.max()))
        if best == view.shape[1]:
            break
        loader.slots.return_(slot)
    return best


def rows(loader, starts):
    for s in starts:
        slot = loader.slots.take(timeout=1.0)  # clean: near miss, the finally runs also when the generator is closed
        if slot is None:
            return
        try:
            n = loader._fill(slot, s)
            for i in range(n):
                yield loader.slots.data[slot, i].clone()
        finally:
            loader.slots.return_(slot)


def first_tokens(loader, starts):
    slot = loader.slots.take()  # leak: replaced by the next take in the loop
    firsts = []
    for s in starts:
        loader._fill(slot, s)
        firsts.append(int(loader.slots.data[slot, 0, 0]))
        slot = loader.slots.take()  # leak: only the last one taken is returned
    loader.slots.return_(slot)
    return firsts
