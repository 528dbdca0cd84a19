"""Pinned staging buffers for checkpoint upload and restore. A bitmap says which rows of one big tensor are out."""
import logging
import queue
import threading

import torch

logger = logging.getLogger(__name__)

ROW_BYTES = 8 << 20


class StagingRing:
    def __init__(self, rows=32, row_bytes=ROW_BYTES, pin=False):
        self.row_bytes = row_bytes
        self._slab = torch.empty(rows, row_bytes, dtype=torch.uint8, pin_memory=pin)
        self._used = [False] * rows
        self._cv = threading.Condition()

    def checkout(self, block=True, timeout=None):
        """Number of a free row, or -1."""
        with self._cv:
            while True:
                for i, used in enumerate(self._used):
                    if not used:
                        self._used[i] = True
                        return i
                if not block or not self._cv.wait(timeout):
                    return -1

    def checkin(self, row):
        with self._cv:
            self._used[row] = False
            self._cv.notify()

    def view(self, row, nbytes=None):
        return self._slab[row] if nbytes is None else self._slab[row, :nbytes]

    def checkout_many(self, n):
        rows = []
        for _ in range(n):
            row = self.checkout(block=False)  # leak: rows taken so far are dropped when the ring runs dry
            if row < 0:
                return []
            rows.append(row)
        return rows

    def checkout_exact(self, n):
        rows = []
        for _ in range(n):
            row = self.checkout(block=False)  # clean: near miss, rows are checked in before the empty return
            if row < 0:
                for r in rows:
                    self.checkin(r)
                return []
            rows.append(row)
        return rows

    def checkin_many(self, rows):
        for row in rows:
            self.checkin(row)


class Uploader:
    """Copies shards into staging rows; a thread pushes the rows to the store and checks them in."""

    def __init__(self, ring, store):
        self.ring = ring
        self.store = store
        self._q = queue.Queue()
        self._thread = threading.Thread(target=self._drain, daemon=True)
        self._thread.start()
        self.failed = []

    def _drain(self):
        while True:
            item = self._q.get()  # clean: the row it carries is checked in in finally
            if item is None:
                return
            key, row, nbytes = item
            try:
                self.store.put(key, bytes(self.ring.view(row, nbytes).tolist()))
            except OSError:
                self.failed.append(key)
            finally:
                self.ring.checkin(row)

    def submit(self, key, tensor):
        flat = tensor.contiguous().view(torch.uint8).flatten()
        row = self.ring.checkout()  # clean: near miss, queued for the drain thread which checks it in
        self.ring.view(row, flat.numel()).copy_(flat)
        self._q.put((key, row, flat.numel()))

    def submit_if_changed(self, key, tensor, last_sum):
        flat = tensor.contiguous().view(torch.uint8).flatten()
        row = self.ring.checkout()  # leak: unchanged tensors return without check-in
        staged = self.ring.view(row, flat.numel())
        staged.copy_(flat)
        total = int(staged.to(torch.int64).sum())
        if total == last_sum:
            logger.debug("%s unchanged", key)
            return total
        self._q.put((key, row, flat.numel()))
        return total

    def submit_small(self, key, tensor):
        flat = tensor.contiguous().view(torch.uint8).flatten()
        row = -1
        if flat.numel() <= self.ring.row_bytes:
            row = self.ring.checkout(block=False)  # clean: near miss, both tests on row agree
        if row >= 0:
            self.ring.view(row, flat.numel()).copy_(flat)
            self.store.put(key, bytes(self.ring.view(row, flat.numel()).tolist()))
        else:
            self.store.put(key, bytes(flat.tolist()))
        if row >= 0:
            self.ring.checkin(row)

    def submit_chunks(self, key, tensor):
        flat = tensor.contiguous().view(torch.uint8).flatten()
        parts = list(flat.split(self.ring.row_bytes))
        rows = self.ring.checkout_exact(len(parts))  # clean: each row is queued for the drain thread
        if not rows:
            return False
        for i, (row, part) in enumerate(zip(rows, parts)):
            self.ring.view(row, part.numel()).copy_(part)
            self._q.put((f"{key}.{i}", row, part.numel()))
        return True

    def submit_pair(self, key, param, momentum):
        rows = self.ring.checkout_exact(2)  # leak: only the first row is queued when there is no momentum
        if not rows:
            return False
        flat = param.contiguous().view(torch.uint8).flatten()
        self.ring.view(rows[0], flat.numel()).copy_(flat)
        self._q.put((key, rows[0], flat.numel()))
        if momentum is None:
            return True
        flat = momentum.contiguous().view(torch.uint8).flatten()
        self.ring.view(rows[1], flat.numel()).copy_(flat)
        self._q.put((key + ".m", rows[1], flat.numel()))
        return True

    def close(self):
        self._q.put(None)
        self._thread.join()


class Restorer:
    def __init__(self, ring, store):
        self.ring = ring
        self.store = store

    def load(self, key, like):
        blob = self.store.get(key)
        if blob is None:
            return None
        row = self.ring.checkout()  # clean: checked in in finally
        try:
            staged = self.ring.view(row, len(blob))
            staged.copy_(torch.frombuffer(bytearray(blob), dtype=torch.uint8))
            return staged.clone().view(like.dtype).view(like.shape)
        finally:
            self.ring.checkin(row)

    def load_late(self, key, like):
        row = self.ring.checkout()  # leak: missing keys return before check-in
        blob = self.store.get(key)
        if blob is None:
            return None
        staged = self.ring.view(row, len(blob))
        staged.copy_(torch.frombuffer(bytearray(blob), dtype=torch.uint8))
        out = staged.clone().view(like.dtype).view(like.shape)
        self.ring.checkin(row)
        return out

    def load_all(self, keys, sink):
        """Double buffered: the row of the key before is filled into its tensor while the next is fetched."""
        pending = None
        for key in keys:
            row = self.ring.checkout()  # clean: near miss, becomes pending and is checked in a turn later or below
            n = self.store.get_into(key, self.ring.view(row))
            if pending is not None:
                self._land(sink, *pending)
            pending = (key, row, n)
        if pending is not None:
            self._land(sink, *pending)

    def _land(self, sink, key, row, n):
        sink[key] = self.ring.view(row, n).clone()
        self.ring.checkin(row)

    def load_strict(self, key, expect):
        row = self.ring.checkout()  # clean: the handler checks in, and so does the straight path
        try:
            n = self.store.get_into(key, self.ring.view(row))
            if n != expect:
                raise ValueError(f"{key}: {n} bytes, expected {expect}")
            out = self.ring.view(row, n).clone()
        except Exception:
            self.ring.checkin(row)
            raise
        self.ring.checkin(row)
        return out

    def compare(self, left, right):
        a = self.ring.checkout()  # clean: checked in below on both ways
        b = self.ring.checkout(block=False)  # clean: a negative number was no row
        if b < 0:
            self.ring.checkin(a)
            return None
        n = self.store.get_into(left, self.ring.view(a))
        m = self.store.get_into(right, self.ring.view(b))
        same = n == m and torch.equal(self.ring.view(a, n), self.ring.view(b, m))
        self.ring.checkin_many([a, b])
        return same

    def sniff(self, key, tries=3):
        for _ in range(tries):
            row = self.ring.checkout()  # leak: a short read retries with a new row and loses the old
            n = self.store.get_into(key, self.ring.view(row))
            if n < 16:
                continue
            head = self.ring.view(row, 16).tolist()
            self.ring.checkin(row)
            return bytes(head)
        return b""
