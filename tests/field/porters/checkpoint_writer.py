"""Asynchronous checkpointing through host snapshot buffers."""
from __future__ import annotations

import fcntl
import logging
import os
import queue
import threading

import torch

log = logging.getLogger(__name__)


class SnapshotBuffers:
    def __init__(self, nbytes, count):
        self._idle = queue.SimpleQueue()
        for _ in range(count):
            self._idle.put(torch.empty(nbytes, dtype=torch.uint8))

    def checkout(self, block=True):
        try:
            return self._idle.get(block)
        except queue.Empty:
            return None

    def checkin(self, buf):
        self._idle.put(buf)


class DirLock:
    """Advisory lock on a checkpoint directory."""

    def __init__(self, directory):
        self._fd = os.open(directory, os.O_RDONLY)  # clean: the object keeps it until close
        self.held = False

    def acquire(self):
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        self.held = True

    def release(self):
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        self.held = False

    def close(self):
        os.close(self._fd)


class BackgroundWriter:
    def __init__(self, buffers, write):
        self.buffers = buffers
        self.write = write
        self.jobs = queue.Queue()
        threading.Thread(target=self._loop, daemon=True).start()

    def save(self, step, flat):
        buf = self.buffers.checkout()  # leak: a failed write is logged and the loop goes on without checking the buffer in
        buf[:flat.nbytes].copy_(flat.view(torch.uint8))
        self.jobs.put((step, buf, flat.nbytes))

    def _loop(self):
        while True:
            step, buf, nbytes = self.jobs.get()
            try:
                self.write(step, buf[:nbytes])
                self.buffers.checkin(buf)
            except OSError:
                log.exception("checkpoint %d", step)


class OrderedWriter:
    def __init__(self, buffers, write):
        self.buffers = buffers
        self.write = write
        self.jobs = queue.Queue()

    def save(self, step, flat):
        buf = self.buffers.checkout(block=False)  # clean: near miss, drain checks it in whether the write works or not
        if buf is None:
            log.warning("skipping checkpoint %d", step)
            return False
        buf[:flat.nbytes].copy_(flat.view(torch.uint8))
        self.jobs.put((step, buf, flat.nbytes))
        return True

    def drain(self):
        failed = []
        while not self.jobs.empty():
            step, buf, nbytes = self.jobs.get()
            try:
                self.write(step, buf[:nbytes])
            except OSError:
                failed.append(step)
            self.buffers.checkin(buf)
        return failed


class LatestSnapshot:
    """Holds the newest snapshot in memory for fast restarts."""

    def __init__(self, buffers):
        self.buffers = buffers
        self.latest = None

    def refresh(self, flat):
        buf = self.buffers.checkout()  # leak: the next refresh swaps it out of the field and drops it
        buf[:flat.nbytes].copy_(flat.view(torch.uint8))
        _, self.latest = self.latest, buf

    def close(self):
        if self.latest is not None:
            self.buffers.checkin(self.latest)
            self.latest = None


class PeerSnapshot:
    """Holds the newest snapshot of the neighbour rank."""

    def __init__(self, buffers):
        self.buffers = buffers
        self.latest = None

    def refresh(self, recv):
        buf = self.buffers.checkout()  # clean: near miss, the swapped out one is what gets checked in
        recv(buf)
        buf, self.latest = self.latest, buf
        if buf is not None:
            self.buffers.checkin(buf)

    def close(self):
        if self.latest is not None:
            self.buffers.checkin(self.latest)
            self.latest = None


class RollingHistory:
    def __init__(self, buffers, keep):
        self.buffers = buffers
        self.keep = keep
        self.history = []

    def add(self, step, flat):
        buf = self.buffers.checkout()  # clean: near miss, what leaves the window is checked in first
        buf[:flat.nbytes].copy_(flat.view(torch.uint8))
        self.history.append((step, buf))
        surplus = self.history[:-self.keep]
        self.history = self.history[-self.keep:]
        for _, old in surplus:
            self.buffers.checkin(old)

    def rewind(self, step):
        while self.history and self.history[-1][0] > step:
            self.buffers.checkin(self.history.pop()[1])
        return self.history[-1][1] if self.history else None


class PartFiles:
    def __init__(self, directory):
        self.directory = directory
        self.parts = {}

    def part(self, name):
        if name not in self.parts:
            self.parts[name] = open(os.path.join(self.directory, name + ".part"), "wb")  # leak: abandon unlinks the part files and clears the table without closing
        return self.parts[name]

    def commit(self):
        for name, fh in self.parts.items():
            fh.close()
            os.replace(fh.name, os.path.join(self.directory, name))
        self.parts.clear()

    def abandon(self):
        for fh in self.parts.values():
            os.unlink(fh.name)
        self.parts.clear()


class LockedPublisher:
    def __init__(self, directory):
        self.directory = directory
        self.lock = DirLock(directory)  # clean: kept in the field, close ends it

    def publish(self, step):
        self.lock.acquire()  # leak: a step that is already published returns with the lock held
        current = os.path.join(self.directory, "latest")
        if os.path.lexists(current) and os.readlink(current) == str(step):
            return False
        os.symlink(str(step), current + ".tmp")
        os.replace(current + ".tmp", current)
        self.lock.release()
        return True

    def prune(self, keep):
        self.lock.acquire()  # clean: released in the finally
        try:
            steps = sorted(int(d) for d in os.listdir(self.directory) if d.isdigit())
            return steps[:-keep]
        finally:
            self.lock.release()

    def close(self):
        self.lock.close()
