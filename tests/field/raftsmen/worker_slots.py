"""Shared-memory batch slots between loader workers and the training process.

Workers collate straight into a slot and send its index through a queue; the
trainer returns indices through another queue.  The `multiprocessing` queues are
the only synchronisation.
"""
import logging
import multiprocessing as mp
import queue
import time
from multiprocessing import shared_memory

import numpy as np

log = logging.getLogger("loader")


class BatchSlots:
    def __init__(self, n, nbytes, ctx=None):
        ctx = ctx or mp.get_context("spawn")
        self.nbytes = nbytes
        self.shm = shared_memory.SharedMemory(create=True, size=n * nbytes)  # clean: unlinked by destroy()
        self._idle = ctx.Queue()
        for i in range(n):
            self._idle.put(i)

    def pull(self, timeout=None):
        try:
            return self._idle.get(timeout=timeout)  # clean: handed to the caller
        except queue.Empty:
            return None

    def push(self, i):
        self._idle.put(i)

    def array(self, i, shape, dtype):
        return np.ndarray(shape, dtype, buffer=self.shm.buf, offset=i * self.nbytes)

    def destroy(self):
        self.shm.close()
        self.shm.unlink()


class Collator:
    def __init__(self, slots, seq_len, pad_id):
        self.slots = slots
        self.seq_len = seq_len
        self.pad_id = pad_id

    def into_slot(self, docs, timeout=5.0):
        """(slot, rows); the slot goes to the trainer."""
        need = len(docs) * self.seq_len * 4
        i = self.slots.pull(timeout)  # leak: a batch too big for a slot returns None with the slot taken
        if i is None:
            return None
        if need > self.slots.nbytes:
            log.error("batch of %d bytes", need)
            return None
        a = self.slots.array(i, (len(docs), self.seq_len), np.int32)
        a.fill(self.pad_id)
        for r, d in enumerate(docs):
            a[r, : min(len(d), self.seq_len)] = d[: self.seq_len]
        return i, len(docs)


def worker_loop(slots, collator, source, out, stop):
    for docs in source:
        if stop.is_set():
            break
        got = collator.into_slot(docs)  # clean: near miss, None is skipped, otherwise sent to the trainer or pushed when its queue stays full
        if got is None:
            continue
        try:
            out.put(got, timeout=10.0)
        except queue.Full:
            slots.push(got[0])
    out.put(None)


def packing_loop(slots, source, out, seq_len, stop):
    """Greedy packing of documents in rows of a slot."""
    cur = None
    fill = 0
    cap = slots.nbytes // 4
    for doc in source:
        if stop.is_set():
            break
        if cur is None:
            cur = slots.pull()  # leak: stop ends the loop and the half-filled slot is neither sent nor pushed
            fill = 0
        n = min(len(doc), seq_len)
        slots.array(cur, (cap,), np.int32)[fill : fill + n] = doc[:n]
        fill += n
        if fill + seq_len > cap:
            out.put((cur, fill))
            cur = None
    if cur is not None and not stop.is_set():
        out.put((cur, fill))
    out.put(None)


class TrainFeed:
    """Iterates over batches; a slot goes back when the next batch is asked for."""

    def __init__(self, slots, inbox, seq_len):
        self.slots = slots
        self.inbox = inbox
        self.seq_len = seq_len
        self._held = None

    def __iter__(self):
        try:
            while True:
                item = self.inbox.get()  # clean: near miss, held until the next turn and pushed in finally
                if item is None:
                    return
                self._held, rows = item
                yield self.slots.array(self._held, (rows, self.seq_len), np.int32)
                self.slots.push(self._held)
                self._held = None
        finally:
            if self._held is not None:
                self.slots.push(self._held)
                self._held = None

    def drain(self, seconds):
        """Throws away what workers have sent, before a restart."""
        end = time.monotonic() + seconds
        n = 0
        while time.monotonic() < end:
            try:
                item = self.inbox.get(timeout=0.05)  # leak: the slots of the drained batches are not pushed
            except queue.Empty:
                break
            if item is not None:
                n += 1
        return n

    def skip_to(self, step, batches_per_step):
        """Fast-forward after a resume."""
        for _ in range(step * batches_per_step):
            item = self.inbox.get()  # clean: None has no slot and ends the skip, others are pushed
            if item is None:
                return False
            self.slots.push(item[0])
        return True


def self_test(slots, rounds=8):
    for k in range(rounds):
        i = slots.pull(timeout=1.0)  # leak: a slot whose readback differs is kept by the early return
        if i is None:
            return False
        a = slots.array(i, (16,), np.int32)
        a[:] = k
        if (slots.array(i, (16,), np.int32) != k).any():
            return False
        slots.push(i)
    return True
