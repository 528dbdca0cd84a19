"""Data loading through shared memory: worker processes decode into slots, the trainer reads them in place.

Free slot numbers travel on one queue, filled ones on another. A slot goes back to the free queue when the
Batch that wraps it is released.
"""
import logging
import multiprocessing as mp
import queue
import struct
from multiprocessing.shared_memory import SharedMemory

import numpy as np

log = logging.getLogger("shm")
HEAD = struct.Struct("<IIQ")
MAGIC = 0x51A7B00C


class SegmentError(Exception):
    pass


class DecodeError(Exception):
    pass


class Segments:
    """Owner side: creates the segments and unlinks them at the end."""

    def __init__(self, slots, slot_bytes, limit_bytes):
        self.slot_bytes = slot_bytes
        self.limit = limit_bytes
        self.total = 0
        self.segs = []
        for _ in range(slots):
            self.add()

    def add(self):
        seg = SharedMemory(create=True, size=self.slot_bytes + HEAD.size)  # leak: over the limit SegmentError is raised and the segment is not unlinked
        if self.total + seg.size > self.limit:
            raise SegmentError("%d bytes of shared memory, limit %d" % (self.total + seg.size, self.limit))
        HEAD.pack_into(seg.buf, 0, MAGIC, 0, 0)
        self.total += seg.size
        self.segs.append(seg)
        return len(self.segs) - 1

    def close(self):
        for seg in self.segs:
            seg.close()
            seg.unlink()
        self.segs = []


def attach(name):
    """Worker side. Raises SegmentError where the name belongs to something else."""
    seg = SharedMemory(name=name)  # leak: the wrong magic raises with the mapping open, worker_main handles it
    magic, _, _ = HEAD.unpack_from(seg.buf, 0)
    if magic != MAGIC:
        raise SegmentError("%s is not a batch segment" % name)
    return seg


def write_batch(seg, seq, samples):
    arr = np.stack(samples)
    if arr.nbytes > seg.size - HEAD.size:
        raise DecodeError("batch %d has %d bytes" % (seq, arr.nbytes))
    HEAD.pack_into(seg.buf, 0, MAGIC, len(samples), seq)
    dst = np.ndarray(arr.shape, arr.dtype, buffer=seg.buf, offset=HEAD.size)
    dst[...] = arr
    return arr.shape, arr.dtype.str


def worker_main(names, dataset, work_q, free_q, full_q):
    segs = {}
    try:
        for i, name in enumerate(names):
            try:
                segs[i] = attach(name)  # clean: all that were attached are closed in finally
            except SegmentError as e:
                log.error("worker cannot use slot %d: %s", i, e)
        while True:
            job = work_q.get()
            if job is None:
                break
            seq, indices = job
            slot = free_q.get()  # leak: a batch that cannot be decoded goes on with the next job
            try:
                samples = [dataset[i] for i in indices]
                shape, dtype = write_batch(segs[slot], seq, samples)
            except (DecodeError, KeyError) as e:
                log.warning("batch %d: %s", seq, e)
                full_q.put((seq, None, None, None))
                continue
            full_q.put((seq, slot, shape, dtype))
    finally:
        for seg in segs.values():
            seg.close()


class Batch:
    def __init__(self, ring, slot, shape, dtype):
        self.ring = ring
        self.slot = slot
        self.view = np.ndarray(shape, dtype, buffer=ring.segments.segs[slot].buf, offset=HEAD.size)

    def __len__(self):
        return self.view.shape[0]

    def copy(self):
        return np.array(self.view)

    def release(self):
        if self.slot is not None:
            self.view = None
            self.ring.free_q.put(self.slot)
            self.slot = None

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.release()


class Ring:
    def __init__(self, dataset, workers, slots, slot_bytes, limit_bytes=1 << 33):
        self.segments = Segments(slots, slot_bytes, limit_bytes)  # clean: kept on self, stop() closes it
        self.free_q, self.work_q, self.full_q = mp.Queue(), mp.Queue(), mp.Queue()
        for i in range(slots):
            self.free_q.put(i)
        self.early = {}
        self.next_seq = 0
        names = [s.name for s in self.segments.segs]
        args = (names, dataset, self.work_q, self.free_q, self.full_q)
        self.procs = [mp.Process(target=worker_main, args=args, daemon=True) for _ in range(workers)]
        for p in self.procs:
            p.start()

    def submit(self, batches):
        n = 0
        for seq, indices in enumerate(batches):
            self.work_q.put((seq, indices))
            n += 1
        return n

    def _receive(self, timeout):
        """The batch with number next_seq; later ones that come first are kept in `early`."""
        while self.next_seq not in self.early:
            seq, slot, shape, dtype = self.full_q.get(timeout=timeout)  # leak: batches that stay in early when the epoch is cut short are cleared by rewind
            self.early[seq] = None if slot is None else Batch(self, slot, shape, dtype)
        batch = self.early.pop(self.next_seq)
        self.next_seq += 1
        return batch

    def rewind(self):
        """Before a new epoch."""
        self.early.clear()
        self.next_seq = 0

    def epoch(self, batches, min_len, timeout=60.0):
        """Copies of the batches of one epoch. Short ones at the end of a shard are left out."""
        self.rewind()
        for _ in range(self.submit(batches)):
            batch = self._receive(timeout)  # leak: the batches that are left out are not released
            if batch is None:
                continue
            if len(batch) < min_len:
                log.debug("short batch of %d", len(batch))
                continue
            yield batch.copy()
            batch.release()

    def epoch_in_place(self, batches, fn, timeout=60.0):
        """fn sees the slot itself. True from fn ends the epoch."""
        self.rewind()
        left = self.submit(batches)
        while left:
            left -= 1
            batch = self._receive(timeout)  # clean: near miss, the with releases it, the early break included
            if batch is None:
                continue
            with batch:
                if fn(batch.view):
                    break
        while left:
            left -= 1
            batch = self._receive(timeout)  # clean: the tail of a broken epoch is released unseen
            if batch is not None:
                batch.release()

    def grab_slot(self, timeout):
        """A slot for the trainer's own use, None when all are busy."""
        try:
            return self.free_q.get(timeout=timeout)  # clean: handed to the caller
        except queue.Empty:
            return None

    def stop(self):
        for _ in self.procs:
            self.work_q.put(None)
        for p in self.procs:
            p.join()
        self.segments.close()


def broadcast_array(ring, arr, sinks):
    """Puts one array into a slot and shows it to several readers, one after the other."""
    slot = ring.grab_slot(5.0)  # clean: near miss, Batch takes it over, without a Batch it is put back here
    if slot is None:
        return False
    try:
        shape, dtype = write_batch(ring.segments.segs[slot], 0, list(arr))
    except DecodeError:
        ring.free_q.put(slot)
        return False
    with Batch(ring, slot, shape, dtype) as batch:
        for sink in sinks:
            sink(batch.view)
    return True


def peek_lengths(names):
    """Number of samples in each segment; for the monitor, which runs in a process of its own."""
    out = {}
    for name in names:
        try:
            seg = attach(name)  # clean: closed below
        except (SegmentError, FileNotFoundError):
            out[name] = None
            continue
        out[name] = HEAD.unpack_from(seg.buf, 0)[1]
        seg.close()
    return out


def dump_slot(ring, path):
    slot = ring.grab_slot(1.0)  # clean: put back in finally
    if slot is None:
        return 0
    f = None
    try:
        f = open(path, "wb")  # clean: near miss, f is None only where open failed
        return f.write(ring.segments.segs[slot].buf)
    except OSError as e:
        log.error("dump to %s: %s", path, e)
        return 0
    finally:
        if f is not None:
            f.close()
        ring.free_q.put(slot)
