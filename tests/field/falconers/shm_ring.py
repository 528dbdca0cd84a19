"""Shared memory ring between loader processes and the trainer.

Plain functions over a plain dict, so that it can be pickled to spawned workers. The
two queues carry slot numbers: "free" those that may be written, "ready" those that
may be read. Whoever holds a number has to put it into one of the two again.
"""
import logging
import queue
import struct
import time
from multiprocessing import get_context
from multiprocessing.shared_memory import SharedMemory

import numpy as np

log = logging.getLogger("ring")
ctx = get_context("spawn")

HEAD = struct.Struct("<IIII")       # version, slots, slot bytes, generation
VERSION = 2


class RingVersion(RuntimeError):
    pass


def ring_create(name, slots, slot_bytes):
    data = SharedMemory(name=name + ".data", create=True, size=slots * slot_bytes)  # clean: unlinked in the handler, else part of the ring
    try:
        ctl = SharedMemory(name=name + ".ctl", create=True, size=HEAD.size + 8 * slots)  # clean: part of the ring, closed by ring_close
    except FileExistsError:
        data.close()
        data.unlink()
        raise
    HEAD.pack_into(ctl.buf, 0, VERSION, slots, slot_bytes, 0)
    ring = {
        "name": name, "slots": slots, "slot_bytes": slot_bytes,
        "data": data, "ctl": ctl, "owner": True,
        "free": ctx.Queue(), "ready": ctx.Queue(),
    }
    for i in range(slots):
        ring["free"].put(i)
    return ring


def ring_attach(name, free, ready):
    """None when there is no such ring (any more)."""
    try:
        ctl = SharedMemory(name=name + ".ctl")  # leak: when the data segment is gone None is returned with this one attached
        version, slots, slot_bytes, _ = HEAD.unpack_from(ctl.buf, 0)
        if version != VERSION:
            ctl.close()
            raise RingVersion("%s has version %d" % (name, version))
        data = SharedMemory(name=name + ".data")  # clean: part of the ring, closed by ring_close
    except FileNotFoundError:
        return None
    return {
        "name": name, "slots": slots, "slot_bytes": slot_bytes,
        "data": data, "ctl": ctl, "owner": False, "free": free, "ready": ready,
    }


def ring_close(ring):
    for seg in (ring["data"], ring["ctl"]):
        seg.close()
        if ring["owner"]:
            seg.unlink()


def generation(ring):
    return HEAD.unpack_from(ring["ctl"].buf, 0)[3]


def next_generation(ring):
    """After a seek of the data set: what is in the ring is out of date."""
    gen = generation(ring) + 1
    HEAD.pack_into(ring["ctl"].buf, 0, VERSION, ring["slots"], ring["slot_bytes"], gen)
    return gen


def slot_array(ring, i, shape, dtype):
    return np.ndarray(shape, dtype, ring["data"].buf, offset=i * ring["slot_bytes"])


def _entry(ring, i):
    return struct.unpack_from("<II", ring["ctl"].buf, HEAD.size + 8 * i)


# slots ------------------------------------------------------------------------

def reserve(ring, timeout=5.0):
    """A slot to write into, -1 when the trainer is too slow."""
    try:
        i = ring["free"].get(timeout=timeout)  # clean: Empty means that there is no slot to give back
    except queue.Empty:
        return -1
    return i


def commit(ring, i, nbytes):
    struct.pack_into("<II", ring["ctl"].buf, HEAD.size + 8 * i, nbytes, generation(ring))
    ring["ready"].put(i)


def retire(ring, i):
    ring["free"].put(i)


def receive(ring, timeout=30.0):
    """A slot to read from; slots of an older generation are passed over."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            i = ring["ready"].get(timeout=max(0.0, deadline - time.monotonic()))  # leak: an outdated slot is passed over and never free again
        except queue.Empty:
            return -1
        if _entry(ring, i)[1] != generation(ring):
            log.debug("slot %d is out of date", i)
            continue
        return i


# producers --------------------------------------------------------------------

def produce(ring, samples):
    sent = 0
    for sample in samples:
        i = reserve(ring)  # leak: a sample that is too large goes on with the slot reserved
        if i < 0:
            log.info("ring is full")
            continue
        if sample.nbytes > ring["slot_bytes"]:
            log.warning("sample of %d bytes left out", sample.nbytes)
            continue
        slot_array(ring, i, sample.shape, sample.dtype)[...] = sample
        commit(ring, i, sample.nbytes)
        sent += 1
    return sent


def produce_packed(ring, rows, width):
    """Several short rows in one slot. The slot is given up when nothing fits."""
    i = reserve(ring)  # clean: near miss, retired when the slot stayed empty and committed otherwise
    if i < 0:
        return 0
    used = 0
    out = slot_array(ring, i, (ring["slot_bytes"],), np.uint8)
    while rows and used + rows[0].nbytes <= min(width, ring["slot_bytes"]):
        row = rows.pop(0)
        out[used:used + row.nbytes] = row.view(np.uint8)
        used += row.nbytes
    if not used:
        retire(ring, i)
        return 0
    commit(ring, i, used)
    return used


def worker_main(name, free, ready, make_source):
    ring = ring_attach(name, free, ready)  # clean: closed in the finally, None needs nothing
    if ring is None:
        return
    try:
        produce(ring, make_source())
    finally:
        ring_close(ring)


# consumers --------------------------------------------------------------------

def arrays(ring, shape, dtype):
    """Views of the samples; a view is valid until the next one is asked for."""
    while True:
        i = receive(ring)  # clean: near miss, retired in the finally when the consumer comes back or closes the generator
        if i < 0:
            return
        try:
            yield slot_array(ring, i, shape, dtype)
        finally:
            retire(ring, i)


def collate(ring, count, shape, dtype):
    """One batch, stacked in a single copy. None when the data ran out."""
    held = []
    while len(held) < count:
        i = receive(ring)  # leak: when the data runs out the slots of an incomplete batch are forgotten
        if i < 0:
            return None
        held.append(i)
    batch = np.stack([slot_array(ring, i, shape, dtype) for i in held])
    for i in held:
        retire(ring, i)
    return batch


def lend(ring, table, key):
    """Keep a sample under a key (hard negatives, replay) until it is returned."""
    if key in table:
        return True
    i = receive(ring)  # leak: start_epoch() clears the table without retiring its slots
    if i < 0:
        return False
    table[key] = i
    return True


def take_back(ring, table, key):
    if key in table:
        retire(ring, table.pop(key))


def start_epoch(ring, table, epoch):
    log.info("epoch %d, %d samples were on loan", epoch, len(table))
    table.clear()
    next_generation(ring)


def relay(src, dst, shape, dtype):
    """Move one sample from ring to ring (trainer node -> evaluation ring)."""
    i = receive(src)  # clean: retired on both ways out
    if i < 0:
        return False
    j = reserve(dst)  # clean: committed when there is one
    if j < 0:
        retire(src, i)
        return False
    source = slot_array(src, i, shape, dtype)
    slot_array(dst, j, shape, dtype)[...] = source
    commit(dst, j, source.nbytes)
    retire(src, i)
    return True
