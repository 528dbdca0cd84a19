"""Asynchronous checkpoints for a training loop.

save() copies the state into bounce buffers and returns, a background thread
writes them out and uploads the files.  At most ``depth`` snapshots are under way.
"""
import hashlib
import json
import logging
import os
import shutil
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

log = logging.getLogger("ckpt")


class UploadFailed(Exception):
    pass


class NoBounceMemory(Exception):
    pass


class BouncePool(object):
    """Pinned buffers, sorted into classes by powers of two."""

    def __init__(self, limit):
        self.limit = limit
        self.allocated = 0
        self.shelves = {}
        self.mutex = threading.Lock()

    @staticmethod
    def _klass(nbytes):
        return max(12, (nbytes - 1).bit_length())

    def rent(self, nbytes):
        klass = self._klass(nbytes)
        with self.mutex:
            shelf = self.shelves.setdefault(klass, [])
            while shelf:
                buf = shelf.pop()  # leak: one that is not pinned any more is dropped, and allocated counts it for ever
                if buf.is_pinned():
                    return buf
                log.warning("a bounce buffer lost its pinning")
            if self.allocated + (1 << klass) > self.limit:
                raise NoBounceMemory("%d of %d allocated" % (self.allocated, self.limit))
            self.allocated += 1 << klass
        return torch.empty(1 << klass, dtype=torch.uint8, pin_memory=True)  # clean: goes to the caller

    def settle(self, buf):
        with self.mutex:
            self.shelves[self._klass(buf.numel())].append(buf)

    def trim(self, keep):
        """Frees buffers of the biggest classes until ``keep`` bytes are left."""
        with self.mutex:
            for klass in sorted(self.shelves, reverse=True):
                while self.shelves[klass] and self.allocated > keep:
                    self.shelves[klass].pop()  # clean: near miss, meant to be freed and counted off
                    self.allocated -= 1 << klass


class Snapshot(object):
    def __init__(self, step, pool):
        self.step = step
        self.pool = pool
        self.parts = {}
        self.extra = {}
        self.spill = None

    def add(self, name, tensor):
        nbytes = tensor.numel() * tensor.element_size()
        buf = self.pool.rent(nbytes)  # clean: near miss, kept in parts, and discard() settles all of parts
        buf[:nbytes].copy_(tensor.detach().view(torch.uint8).flatten(), non_blocking=True)
        self.parts[name] = (buf, nbytes, str(tensor.dtype), tuple(tensor.shape))

    def add_rng(self, state):
        self.extra["rng"] = self.pool.rent(state.numel())  # leak: discard() settles parts and not what is in extra
        self.extra["rng"][: state.numel()].copy_(state)

    def discard(self):
        while self.parts:
            _, (buf, _, _, _) = self.parts.popitem()
            self.pool.settle(buf)
        if self.spill is not None:
            shutil.rmtree(self.spill, ignore_errors=True)
            self.spill = None


class Depth(object):
    """Permits for snapshots in flight."""

    def __init__(self, n):
        self.sem = threading.BoundedSemaphore(n)
        self.skipped = 0

    def enter(self, block):
        ok = self.sem.acquire(blocking=block)  # clean: goes to the caller as a bool
        if not ok:
            self.skipped += 1
        return ok

    def leave(self):
        self.sem.release()


class Uploader(object):
    """Multipart uploads to an object store."""

    PART = 64 << 20

    def __init__(self, client, bucket, retries=3):
        self.client = client
        self.bucket = bucket
        self.retries = retries

    def _parts(self, upload, handle):
        digests = []
        while True:
            chunk = handle.read(self.PART)
            if not chunk:
                return digests
            if not self.client.put_part(upload, len(digests), chunk):
                raise UploadFailed("part %d" % len(digests))
            digests.append(hashlib.md5(chunk).hexdigest())

    def send(self, path, key):
        for attempt in range(self.retries):
            upload = self.client.create_multipart(self.bucket, key)  # leak: a failed attempt goes into the next round without abort_multipart
            try:
                with open(path, "rb") as handle:  # clean: with
                    digests = self._parts(upload, handle)
            except UploadFailed as exc:
                log.warning("%s, attempt %d: %s", key, attempt, exc)
                continue
            self.client.complete_multipart(upload, digests)
            return digests
        raise UploadFailed(key)

    def send_small(self, blob, key):
        upload = self.client.create_multipart(self.bucket, key)  # clean: completed or aborted
        if not self.client.put_part(upload, 0, blob):
            self.client.abort_multipart(upload)
            raise UploadFailed(key)
        self.client.complete_multipart(upload, [hashlib.md5(blob).hexdigest()])


class Checkpointer(object):
    def __init__(self, pool, uploader, scratch, depth=2, rank=0):
        self.pool = pool
        self.uploader = uploader
        self.scratch = scratch
        self.depth = Depth(depth)
        self.rank = rank
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="ckpt")  # clean: shut down by close()
        self.errors = []

    # ---- on the training thread

    def save(self, step, model, optimizer, block=False):
        if not self.depth.enter(block):  # clean: near miss, left in the handler or by _finished, which runs for every future
            log.info("step %d: skipped", step)
            return False
        snap = Snapshot(step, self.pool)
        try:
            for name, p in model.named_parameters():
                snap.add(name, p)
            for i, group in enumerate(optimizer.param_groups):
                for j, p in enumerate(group["params"]):
                    for k, v in optimizer.state[p].items():
                        snap.add("optim.%d.%d.%s" % (i, j, k), v)
            snap.add_rng(torch.get_rng_state())
        except NoBounceMemory as exc:
            log.error("step %d: %s", step, exc)
            snap.discard()
            self.depth.leave()
            return False
        torch.cuda.synchronize()
        fut = self.executor.submit(self._write, snap)
        fut.add_done_callback(lambda f: self._finished(snap, f))
        return True

    def _finished(self, snap, fut):
        snap.discard()
        self.depth.leave()
        if fut.exception() is not None:
            log.error("step %d: %s", snap.step, fut.exception())
            self.errors.append(snap.step)

    def save_on_signal(self, step, model):
        """Last checkpoint ahead of a preemption, model only, on this thread."""
        if not self.depth.enter(True):  # leak: the UploadFailed of _write is caught and logged past the leave()
            return False
        snap = Snapshot(step, self.pool)
        try:
            for name, p in model.named_parameters():
                snap.add(name, p)
            self._write(snap)
            self.depth.leave()
            return True
        except (NoBounceMemory, UploadFailed) as exc:
            log.error("no last checkpoint: %s", exc)
            return False
        finally:
            snap.discard()

    # ---- on the background thread

    def _write(self, snap):
        snap.spill = tempfile.mkdtemp(prefix="step%d-" % snap.step, dir=self.scratch)  # clean: near miss, discard() removes the directory
        index = {}
        for name, (buf, nbytes, dtype, shape) in snap.parts.items():
            path = os.path.join(snap.spill, name)
            with open(path, "wb") as handle:  # clean: with
                handle.write(memoryview(buf[:nbytes].numpy()))
            index[name] = {"dtype": dtype, "shape": shape, "bytes": nbytes}
            self.uploader.send(path, "step-%d/%s" % (snap.step, name))
        self.uploader.send_small(json.dumps(index).encode(), "step-%d/index-%d" % (snap.step, self.rank))

    # ---- reading back

    def restore(self, step, model, fetch):
        where = tempfile.mkdtemp(prefix="restore-", dir=self.scratch)  # leak: an index that does not match returns without the rmtree
        index = json.loads(fetch("step-%d/index-%d" % (step, self.rank), where))
        params = dict(model.named_parameters())
        if set(index) - set(params):
            log.error("step %d has unknown names", step)
            return False
        for name, info in index.items():
            buf = self.pool.rent(info["bytes"])  # clean: settled at the end of the round
            data = fetch("step-%d/%s" % (step, name), where)
            buf[: info["bytes"]].copy_(torch.frombuffer(data, dtype=torch.uint8))
            params[name].data.view(torch.uint8).flatten().copy_(buf[: info["bytes"]])
            self.pool.settle(buf)
        shutil.rmtree(where)
        if dist.is_initialized():
            dist.barrier()
        return True

    def close(self):
        self.executor.shutdown(wait=True)
        self.pool.trim(0)
