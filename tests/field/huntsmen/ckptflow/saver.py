"""Saving: device tensors are copied to staging, and uploaded while training goes on."""
import json
import logging
import threading
import zlib

log = logging.getLogger("ckptflow.saver")


class PendingSave:
    """The buffers of one step that are still on their way."""

    def __init__(self, saver, step):
        self.saver = saver
        self.step = step
        self.staged = {}
        self.futures = {}
        self.failed = []
        self._lock = threading.Lock()

    def add(self, key, buf):
        self.staged[key] = buf

    def launch(self):
        while self.staged:
            key, buf = self.staged.popitem()
            self.futures[key] = self.saver.store.submit(self.saver.executor, key, buf, self._done)

    def _done(self, key, buf, future):
        buf.release()
        if future.exception() is not None or not future.result():
            with self._lock:
                self.failed.append(key)

    def wait(self):
        for future in list(self.futures.values()):
            future.exception()
        return not self.failed

    def cancel(self):
        """Give up what has not been launched."""
        log.info("step %d: %d buffers given up", self.step, len(self.staged))
        self.staged.clear()


class ShardSaver:
    def __init__(self, store, area, executor, rank):
        self.store, self.area, self.executor, self.rank = store, area, executor, rank
        self.digests = {}
        self.unchanged = 0

    def _key(self, step, name):
        return f"step-{step:08d}/rank-{self.rank}/{name}"

    def save(self, step, tensors, should_stop):
        pending = PendingSave(self, step)
        for name, raw in tensors:
            buf = self.area.reserve(len(raw))  # leak: when training is stopped PendingSave.cancel() clears the table without releasing
            buf.fill(raw)
            pending.add(self._key(step, name), buf)
            if should_stop():
                pending.cancel()
                return None
        pending.launch()
        return pending

    def save_changed(self, step, tensors):
        """Only the tensors that differ from the last time, one after the other."""
        written = []
        for name, raw in tensors:
            buf = self.area.reserve(len(raw))  # leak: for an unchanged tensor the loop continues before the release
            buf.fill(raw)
            digest = zlib.adler32(raw)
            if self.digests.get(name) == digest:
                self.unchanged += 1
                continue
            key = self._key(step, name)
            if self.store.put_buffer(key, buf):
                self.digests[name] = digest
                written.append(key)
            buf.release()
        return written

    def save_small(self, step, name, raw):
        """Compressed, if there is staging memory to be had at once."""
        buf = self.area.try_reserve(len(raw))  # clean: near miss, None writes directly, otherwise the finally releases what shrink() left
        if buf is None:
            self.store.put_bytes(self._key(step, name), raw)
            return
        try:
            packed = zlib.compress(raw, 1)
            if len(packed) < len(raw):
                buf.shrink(len(packed))
                raw = packed
            buf.fill(raw)
            self.store.put_buffer(self._key(step, name), buf)
        finally:
            buf.release()

    def save_manifest(self, step, keys):
        data = json.dumps({"step": step, "keys": sorted(keys)}).encode()
        self.store.put_bytes(f"step-{step:08d}/manifest.json", data)
