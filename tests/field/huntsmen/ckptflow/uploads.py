"""Multipart uploads to an object store: begin, put parts, then complete or abort.

An upload that is neither completed nor aborted is billed until somebody notices.
"""
import contextlib
import hashlib
import logging
import threading

log = logging.getLogger("ckptflow.uploads")


class PartRejected(Exception):
    pass


class Upload:
    def __init__(self, store, key, token):
        self.store, self.key, self.token = store, key, token
        self.etags = []

    def put(self, data):
        tag = hashlib.md5(data).hexdigest()
        if self.store.http.put(self.key, self.token, len(self.etags), data) != tag:
            raise PartRejected(f"{self.key} part {len(self.etags)}")
        self.etags.append(tag)

    def complete(self):
        self.store.http.complete(self.key, self.token, self.etags)

    def abort(self):
        self.store.http.abort(self.key, self.token)


class Store:
    def __init__(self, http, width=8):
        self.http = http
        self.slots = threading.BoundedSemaphore(width)

    def begin(self, key):
        token = self.http.begin(key)  # clean: the Upload owns the token
        return Upload(self, key, token)

    @contextlib.contextmanager
    def upload(self, key):
        up = self.begin(key)  # clean: near miss, aborted on any error and completed otherwise
        try:
            yield up
        except BaseException:
            up.abort()
            raise
        up.complete()

    def put_buffer(self, key, buf):
        """True if the object is there afterwards. Does not release the buffer."""
        up = self.begin(key)  # leak: a rejected part returns False and the upload is not aborted
        try:
            for part in buf.parts():
                up.put(part)
        except PartRejected as exc:
            log.error("upload of %s: %s", key, exc)
            return False
        up.complete()
        return True

    def put_bytes(self, key, data):
        with self.upload(key) as up:  # clean: the context manager completes or aborts
            up.put(data)

    def submit(self, executor, key, buf, done):
        """Upload in the background; the slot bounds how many are under way."""
        self.slots.acquire()  # clean: near miss, the callback below releases it first of all

        def finished(future):
            self.slots.release()
            done(key, buf, future)

        future = executor.submit(self.put_buffer, key, buf)
        future.add_done_callback(finished)
        return future
