"""Embedding batches from several threads, with size-classed input buffers."""
from __future__ import annotations

import logging
import queue
import threading
from concurrent.futures import Future

import numpy as np

logger = logging.getLogger("embed")


class EncodeError(RuntimeError):
    pass


class InputBuf:
    def __init__(self, rows: int, width: int = 512):
        self.rows = rows
        self.ids = np.zeros((rows, width), np.int32)
        self.used = 0
        self.pinned = False

    @property
    def full(self):
        return self.used >= self.rows

    def fill(self, token_lists):
        for ids in token_lists:
            self.add(ids)

    def add(self, ids):
        self.ids[self.used, : len(ids)] = ids
        self.used += 1

    def free(self):
        self.ids = None


class Shelf:
    CLASSES = (8, 32, 128)

    def __init__(self, per_class: int = 4):
        self._bufs = {c: [InputBuf(c) for _ in range(per_class)] for c in self.CLASSES}
        self._cv = threading.Condition()

    def _pick(self, rows):
        for c in self.CLASSES:
            if c >= rows and self._bufs[c]:
                return self._bufs[c].pop()  # clean: handed to the caller
        return None

    def check_out(self, rows: int) -> InputBuf:
        with self._cv:
            buf = self._pick(rows)  # clean: returned when there is one
            while buf is None:
                self._cv.wait()
                buf = self._pick(rows)  # clean: near miss, rebound only while it is None
            return buf

    def try_out(self, rows: int) -> InputBuf | None:
        with self._cv:
            return self._pick(rows)  # clean: handed to the caller

    def check_in(self, buf: InputBuf) -> None:
        with self._cv:
            buf.used = 0
            self._bufs[buf.rows].append(buf)
            self._cv.notify()

    def trim(self, keep: int) -> int:
        """Frees spare buffers beyond keep; pinned memory is expensive to get again."""
        freed = 0
        with self._cv:
            for bufs in self._bufs.values():
                for _ in range(max(0, len(bufs) - keep)):
                    buf = bufs.pop()  # leak: a pinned one is neither freed nor put back
                    if buf.pinned:
                        continue
                    buf.free()
                    freed += 1
        return freed


class Encoder:
    def __init__(self, model):
        self.model = model

    def encode(self, buf: InputBuf) -> np.ndarray:
        out = self.model(buf.ids[: buf.used])
        if np.isnan(out).any():
            raise EncodeError("nan in the output")
        return out

    def submit(self, buf: InputBuf, done) -> None:
        def work():
            try:
                out = self.encode(buf)
            except EncodeError as exc:
                done(exc, None)
                return
            done(None, out)

        threading.Thread(target=work, daemon=True).start()


class Batcher:
    def __init__(self, shelf: Shelf, encoder: Encoder):
        self.shelf = shelf
        self.encoder = encoder
        self._q: queue.Queue = queue.Queue()
        self._pending: dict[str, InputBuf] = {}
        self._plock = threading.Lock()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    # -- queued --------------------------------------------------------------

    def enqueue(self, token_lists) -> Future:
        fut: Future = Future()
        buf = self.shelf.check_out(len(token_lists))  # leak: stop() drains the queue and forgets the buffers in it
        buf.fill(token_lists)
        self._q.put((buf, fut))
        return fut

    def _loop(self):
        while not self._stopping:
            item = self._q.get()
            if item is None:
                break
            buf, fut = item
            if not fut.set_running_or_notify_cancel():
                self.shelf.check_in(buf)
                continue
            try:
                fut.set_result(self.encoder.encode(buf))
            except EncodeError as exc:
                fut.set_exception(exc)
            finally:
                self.shelf.check_in(buf)

    def stop(self):
        self._stopping = True
        dropped = 0
        while True:
            try:
                item = self._q.get_nowait()
            except queue.Empty:
                break
            if item is not None:
                item[1].cancel()
                dropped += 1
        self._q.put(None)
        self._thread.join()
        logger.info("stopped, %d requests dropped", dropped)

    # -- direct ----------------------------------------------------------------

    def encode_now(self, token_lists):
        buf = self.shelf.check_out(len(token_lists))  # leak: the handler of EncodeError returns without check_in
        buf.fill(token_lists)
        try:
            out = self.encoder.encode(buf)
        except EncodeError:
            logger.exception("encode failed")
            return None
        self.shelf.check_in(buf)
        return out

    def encode_async(self, token_lists, callback) -> None:
        buf = self.shelf.check_out(len(token_lists))  # leak: done() returns early for an error
        buf.fill(token_lists)

        def done(err, out):
            if err is not None:
                callback(None)
                return
            self.shelf.check_in(buf)
            callback(out)

        self.encoder.submit(buf, done)

    def encode_detached(self, token_lists, callback) -> None:
        buf = self.shelf.check_out(len(token_lists))  # clean: near miss, the closure checks in first, for errors as well
        buf.fill(token_lists)

        def done(err, out):
            self.shelf.check_in(buf)
            if err is not None:
                logger.warning("detached: %s", err)
                return
            callback(out)

        self.encoder.submit(buf, done)

    def similarity(self, left, right):
        a = self.shelf.check_out(len(left))  # clean: near miss, checked in when there is no second one
        b = self.shelf.try_out(len(right))  # clean: None or checked in by the finally
        if b is None:
            self.shelf.check_in(a)
            return None
        try:
            a.fill(left)
            b.fill(right)
            return self.encoder.encode(a) @ self.encoder.encode(b).T
        except EncodeError:
            return None
        finally:
            self.shelf.check_in(a)
            self.shelf.check_in(b)

    def collect(self, source):
        """Encodes however many rows the source yields."""
        buf = self.shelf.check_out(8)  # leak: replaced by a bigger one without check_in
        for ids in source:
            if buf.full:
                bigger = self.shelf.check_out(min(128, buf.rows * 4))  # leak: a third size replaces this one in the same way
                for row in buf.ids[: buf.used]:
                    bigger.add(row)
                buf = bigger
            buf.add(ids)
        try:
            return self.encoder.encode(buf)
        finally:
            self.shelf.check_in(buf)

    # -- prepared ----------------------------------------------------------------

    def prepare(self, key: str, token_lists) -> bool:
        with self._plock:
            if key in self._pending:
                return False
            buf = self.shelf.try_out(len(token_lists))  # clean: near miss, waits in the pending table for commit() or forget()
            if buf is None:
                return False
            self._pending[key] = buf
        buf.fill(token_lists)
        return True

    def commit(self, key: str):
        with self._plock:
            buf = self._pending.pop(key)
        try:
            return self.encoder.encode(buf)
        finally:
            self.shelf.check_in(buf)

    def forget(self, key: str) -> None:
        with self._plock:
            buf = self._pending.pop(key, None)
        if buf is not None:
            self.shelf.check_in(buf)
