"""Asynchronous checkpoint staging: device tensor -> pinned host slab -> disk.

All public methods of Stager are called from the trainer thread. The writer
thread touches nothing but the jobs that come through its inbox.
"""
import logging
import os
import queue
import threading
import time

import torch

log = logging.getLogger("ckpt.stager")

HEADER_BYTES = 4096


class StagingError(RuntimeError):
    pass


def as_bytes(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


class Slab:
    def __init__(self, index, nbytes):
        self.index = index
        self.nbytes = nbytes
        self.used = 0
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def view(self):
        return self.tensor[:self.used]


class SlabPool:
    def __init__(self, count, nbytes):
        self.slab_bytes = nbytes
        self._cond = threading.Condition()
        self._free = [Slab(i, nbytes) for i in range(count)]

    def take(self, need, timeout=None):
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._cond:
            while not self._free:
                left = None if deadline is None else deadline - time.monotonic()
                if not self._cond.wait(left):
                    raise StagingError("no free slab after %.1f s" % timeout)
            slab = self._free.pop()  # leak: a request larger than a slab raises after the pop
        if need > slab.nbytes:
            raise StagingError("%d bytes do not fit a slab of %d" % (need, slab.nbytes))
        slab.used = need
        return slab

    def try_take(self, need):
        with self._cond:
            if not self._free or need > self.slab_bytes:
                return None
            slab = self._free.pop()  # clean: returned to the caller
            slab.used = need
            return slab

    def give(self, slab):
        with self._cond:
            slab.used = 0
            self._free.append(slab)
            self._cond.notify()


class StageJob:
    """One named blob on its way to the disk. finish() is called exactly once."""

    def __init__(self, pool, name, slab):
        self.pool = pool
        self.name = name
        self.slab = slab
        self.error = None
        self.done = threading.Event()

    def finish(self, error=None):
        slab, self.slab = self.slab, None
        if slab is not None:
            self.pool.give(slab)
        self.error = error
        self.done.set()


class Writer(threading.Thread):
    def __init__(self, directory):
        super().__init__(name="ckpt-writer", daemon=True)
        self.directory = directory
        self.inbox = queue.Queue()
        self.written = 0
        self.failed = 0

    def run(self):
        while True:
            job = self.inbox.get()
            if job is None:
                return
            try:
                count = self._write(job)
            except OSError as exc:
                self.failed += 1
                log.error("writing %s: %s", job.name, exc)
                job.finish(exc)
                continue
            job.finish()
            self.written += count

    def _write(self, job):
        path = os.path.join(self.directory, job.name)
        tmp = path + ".tmp"
        fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)  # clean: closed in the finally
        try:
            count = os.write(fd, memoryview(job.slab.view().numpy()))
            if count != job.slab.used:
                raise OSError("short write: %d of %d" % (count, job.slab.used))
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(tmp, path)
        return count


class Snapshot:
    """Consistent host copy of the small states (RNG, scheduler, grad scaler)."""

    def __init__(self, pool, step):
        self.pool = pool
        self.step = step
        self.parts = {}
        self.header = pool.take(HEADER_BYTES)  # leak: close() gives back the parts and not the header

    def add(self, name, tensor):
        flat = as_bytes(tensor)
        slab = self.pool.take(flat.numel())  # clean: near miss, the table owns it until close(), and the entry before is given back
        slab.view().copy_(flat)
        old = self.parts.get(name)
        self.parts[name] = slab
        if old is not None:
            self.pool.give(old)

    def dump(self, path):
        index = ["%s:%d" % (name, slab.used) for name, slab in self.parts.items()]
        text = ("step=%d\n" % self.step + "\n".join(index)).encode()[:HEADER_BYTES]
        self.header.tensor[:len(text)].copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        with open(path, "wb") as out:  # clean: closed by the with statement
            out.write(self.header.view().numpy())
            for slab in self.parts.values():
                out.write(slab.view().numpy())

    def close(self):
        for slab in self.parts.values():
            self.pool.give(slab)
        self.parts.clear()


class Stager:
    def __init__(self, directory, slabs=8, slab_bytes=64 << 20, timeout=30.0):
        self.directory = directory
        self.timeout = timeout
        self.pool = SlabPool(slabs, slab_bytes)
        self.stream = torch.cuda.Stream()
        self.pending = {}
        self.rng_slab = None
        self.writer = Writer(directory)
        self.writer.start()

    def _copy(self, slab, flat):
        with torch.cuda.stream(self.stream):
            slab.view().copy_(flat, non_blocking=True)
        self.stream.synchronize()

    def _submit(self, name, slab):
        job = StageJob(self.pool, name, slab)
        self.pending[name] = job
        self.writer.inbox.put(job)
        return job

    def warm_up(self):
        """Touch every page once so that the first checkpoint is not slow."""
        touched = []
        while True:
            slab = self.pool.try_take(self.pool.slab_bytes)  # clean: each one goes into the list, which is given back below
            if slab is None:
                break
            slab.tensor.zero_()
            touched.append(slab)
        for slab in touched:
            self.pool.give(slab)
        return len(touched)

    def stage(self, name, tensor):
        flat = as_bytes(tensor)
        slab = self.pool.take(flat.numel(), self.timeout)  # clean: near miss, the job owns it and the writer finishes each job
        self._copy(slab, flat)
        return self._submit(name, slab)

    def stage_group(self, named):
        """All or nothing: the tensors of one optimizer group belong together."""
        held = []
        for name, tensor in named:
            flat = as_bytes(tensor)
            slab = self.pool.try_take(flat.numel())  # leak: the early return forgets the slabs of the rounds before
            if slab is None:
                log.warning("no room for the whole group, %s is late", name)
                return False
            held.append((name, slab, flat))
        for name, slab, flat in held:
            self._copy(slab, flat)
            self._submit(name, slab)
        return True

    def stage_bf16(self, name, tensor):
        flat = as_bytes(tensor.float())
        raw = self.pool.take(flat.numel(), self.timeout)  # leak: the second take raises StagingError while this one is held
        self._copy(raw, flat)
        packed = self.pool.take(flat.numel() // 2, self.timeout)  # clean: goes to the writer
        source = raw.view().view(torch.float32)
        packed.view().view(torch.bfloat16).copy_(source)
        self.pool.give(raw)
        return self._submit(name, packed)

    def stage_if_room(self, name, tensor):
        flat = as_bytes(tensor)
        slab = self.pool.try_take(flat.numel())  # clean: near miss, the flag is true only when nothing was taken
        direct = slab is None
        if direct:
            torch.save(flat.cpu(), os.path.join(self.directory, name))
        else:
            self._copy(slab, flat)
        if not direct:
            self._submit(name, slab)
        return not direct

    def keep_rng(self, state):
        """Newest RNG state in memory, for restarts inside the same process."""
        flat = as_bytes(state)
        self.rng_slab = self.pool.take(flat.numel(), self.timeout)  # leak: the slab of the call before is overwritten
        self.rng_slab.view().copy_(flat)

    def small_states(self, step, states):
        snap = Snapshot(self.pool, step)  # clean: closed in the finally
        try:
            for name, tensor in states.items():
                snap.add(name, tensor)
            snap.dump(os.path.join(self.directory, "small-%d.bin" % step))
        finally:
            snap.close()

    def close(self):
        if self.rng_slab is not None:
            self.pool.give(self.rng_slab)
            self.rng_slab = None
        self.writer.inbox.put(None)
        self.writer.join()
        self.pending.clear()
