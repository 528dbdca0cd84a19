"""Copies slots to remote storage. Sessions are limited by the backend."""
from __future__ import annotations

import logging
import queue
import threading
from typing import Protocol

from .slots import Slot

log = logging.getLogger(__name__)


class Backend(Protocol):
    def begin(self, name: str) -> int: ...
    def put_part(self, session: int, key: str, data: bytes) -> bool: ...
    def commit(self, session: int) -> None: ...
    def abandon(self, session: int) -> None: ...


class Uploader:
    def __init__(self, backend: Backend, depth: int = 2) -> None:
        self.backend = backend
        self.todo: queue.Queue[Slot | None] = queue.Queue(maxsize=depth)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def submit(self, slot: Slot) -> None:
        """Takes a reference of its own, let go when the upload has ended."""
        self.todo.put(slot.hold())  # clean: _run lets it go

    def offer(self, slot: Slot) -> bool:
        held = slot.hold()  # leak: a full queue drops the extra reference
        try:
            self.todo.put_nowait(held)
            return True
        except queue.Full:
            log.info("upload of step %d skipped", slot.step)
            return False

    def _run(self) -> None:
        while True:
            slot = self.todo.get()
            if slot is None:
                return
            try:
                if not slot.blobs:
                    continue
                self.upload(slot)
            finally:
                slot.let_go()

    def upload(self, slot: Slot) -> bool:
        sess = self.backend.begin(f"step-{slot.step}")  # clean: committed, or abandoned at the first part that fails
        for key, data in slot.blobs.items():
            if not self.backend.put_part(sess, key, data):
                self.backend.abandon(sess)
                return False
        self.backend.commit(sess)
        return True

    def upload_one(self, slot: Slot, key: str) -> bool:
        sess = self.backend.begin(f"step-{slot.step}-{key}")  # leak: an unknown key returns without abandon
        data = slot.blobs.get(key)
        if data is None:
            return False
        if self.backend.put_part(sess, key, data):
            self.backend.commit(sess)
            return True
        self.backend.abandon(sess)
        return False

    def stop(self) -> None:
        self.todo.put(None)
        self.thread.join()
