# Data loader: worker threads decode samples into fixed shared-memory slots,
# the training loop consumes them through a prefetch queue.

import queue
import threading
import numpy as np


class SlotTable(object):
    def __init__(self, nslots, nbytes):
        self.nbytes = nbytes
        self.arena = np.zeros((nslots, nbytes), dtype=np.uint8)
        self.busy = [False] * nslots
        self.cv = threading.Condition()

    def obtain(self, timeout=None):
        """Returns a slot number, or -1 when none gets free in time."""
        with self.cv:  # clean: with releases
            while True:
                for i, b in enumerate(self.busy):
                    if not b:
                        self.busy[i] = True
                        return i
                if not self.cv.wait(timeout):
                    return -1

    def recycle(self, i):
        with self.cv:  # clean: with releases
            self.busy[i] = False
            self.cv.notify()


class Batch(object):
    def __init__(self, table, slots):
        self.table = table
        self.slots = slots

    def arrays(self):
        return [self.table.arena[s] for s in self.slots]

    def done(self):
        for s in self.slots:
            self.table.recycle(s)
        self.slots = []


class Prefetcher(object):
    def __init__(self, dataset, table, depth=4, batch_size=8):
        self.dataset = dataset
        self.table = table
        self.batch_size = batch_size
        self.ready = queue.Queue(maxsize=depth)
        self.stopping = False

    def worker(self):
        for sample in self.dataset:
            slot = self.table.obtain()  # clean: queued as a batch, consume() recycles
            self.table.arena[slot, : len(sample)] = sample
            self.ready.put(Batch(self.table, [slot]))
        self.ready.put(None)

    def worker_filtering(self, keep):
        for sample in self.dataset:
            slot = self.table.obtain()  # leak: a sample that is filtered out keeps its slot
            self.table.arena[slot, : len(sample)] = sample
            if not keep(self.table.arena[slot]):
                continue
            self.ready.put(Batch(self.table, [slot]))
        self.ready.put(None)

    def worker_filtering_first(self, keep):
        for sample in self.dataset:
            if not keep(sample):
                continue
            slot = self.table.obtain(timeout=5.0)  # clean: near miss, -1 means that nothing was taken
            if slot < 0:
                continue
            self.table.arena[slot, : len(sample)] = sample
            self.ready.put(Batch(self.table, [slot]))
        self.ready.put(None)

    def consume(self, fn):
        while True:
            batch = self.ready.get()
            if batch is None:
                break
            fn(batch.arrays())
            batch.done()

    def assemble(self, samples):
        slots = []
        for s in samples[: self.batch_size]:
            i = self.table.obtain(timeout=1.0)  # leak: the slots gathered before a timeout are dropped
            if i == -1:
                return None
            self.table.arena[i, : len(s)] = s
            slots.append(i)
        return Batch(self.table, slots)

    def assemble_all(self, samples):
        slots = []
        for s in samples[: self.batch_size]:
            i = self.table.obtain(timeout=1.0)  # clean: near miss, a short batch is handed on, not dropped
            if i == -1:
                break
            self.table.arena[i, : len(s)] = s
            slots.append(i)
        return Batch(self.table, slots)

    def first_sample(self, samples):
        batch = self.assemble_all(samples[:1])  # leak: copied out and never done
        return batch.arrays()[0].copy()

    def checksum(self, samples):
        batch = self.assemble_all(samples)  # clean: done() recycles the slots
        total = 0
        for a in batch.arrays():
            total = (total + int(a.sum())) & 0xFFFFFFFF
        batch.done()
        return total

    def pad_last(self, sample, width):
        slot = self.table.obtain()  # clean: recycled on both branches
        row = self.table.arena[slot]
        row[: len(sample)] = sample
        if width > self.table.nbytes:
            self.table.recycle(slot)
            raise ValueError("width %d" % width)
        out = row[:width].copy()
        self.table.recycle(slot)
        return out

    def shuffle_pair(self, a, b):
        x = self.table.obtain()  # clean: recycled at the end and on the timeout of the second
        y = self.table.obtain(0.5)  # leak: recycle is called for x twice, y is forgotten
        if y < 0:
            self.table.recycle(x)
            return a, b
        self.table.arena[x, : len(a)] = a
        self.table.arena[y, : len(b)] = b
        res = self.table.arena[y].copy(), self.table.arena[x].copy()
        self.table.recycle(x)
        self.table.recycle(x)
        return res

    def stop(self):
        self.stopping = True
        while not self.ready.empty():
            b = self.ready.get()
            if b is not None:
                b.done()
