from __future__ import annotations

import json
import os
from typing import BinaryIO, Optional

from .jobs import WriteJob, WriterThread
from .staging import StagingManager


class CheckpointWriter:
    def __init__(self, root: str, staging: StagingManager) -> None:
        self.root = root
        self.staging = staging
        self.thread = WriterThread(staging)
        self._manifest: Optional[BinaryIO] = None
        self._steps: dict[int, BinaryIO] = {}

    def _path(self, name: str) -> str:
        return os.path.join(self.root, name)

    def save_tensor(self, name: str, payload: bytes) -> bool:
        if len(payload) > self.staging.size:
            return False
        area = self.staging.obtain()  # clean: near miss, moves into the job; the writer thread relinquishes it
        if area is None:
            return False
        area.load(payload)
        out = open(self._path(name), "wb")  # clean: near miss, the job owns the file and the thread closes it
        self.thread.submit(WriteJob(area, out))
        return True

    def save_if_changed(self, name: str, payload: bytes, digest: str, known: dict[str, str]) -> bool:
        area = self.staging.obtain()  # leak: an unchanged digest returns before the job is made
        if area is None or len(payload) > self.staging.size:
            return False
        if known.get(name) == digest:
            return False
        area.load(payload)
        known[name] = digest
        self.thread.submit(WriteJob(area, open(self._path(name), "wb")))  # clean: owned by the job
        return True

    def save_slice(self, name: str, payload: bytes, offset: int) -> bool:
        """Several slices share a file, so the thread must not close it under the others."""
        area = self.staging.obtain()  # clean: moves into the job
        if area is None:
            return False
        area.load(payload[:self.staging.size])
        path = self._path(name)
        f = open(path, "r+b" if os.path.exists(path) else "w+b")  # leak: the job says owns_file=False and nobody else keeps the handle
        self.thread.submit(WriteJob(area, f, offset, owns_file=False))
        return True

    def begin_step(self, step: int) -> None:
        if step not in self._steps:
            self._steps[step] = open(self._path(f"step{step}.bin"), "w+b")  # clean: near miss, kept under a free key, end_step closes it

    def save_in_step(self, step: int, payload: bytes, offset: int) -> bool:
        area = self.staging.obtain()  # leak: an unknown step returns False with the area out
        if area is None:
            return False
        f = self._steps.get(step)
        if f is None:
            return False
        area.load(payload[:self.staging.size])
        self.thread.submit(WriteJob(area, f, offset, owns_file=False))
        return True

    def end_step(self, step: int) -> None:
        f = self._steps.pop(step, None)
        if f is not None:
            f.flush()
            f.close()

    def note(self, record: dict) -> None:
        if self._manifest is None:
            self._manifest = open(self._path("manifest.jsonl"), "ab")  # clean: near miss, opened only while the field is None; rotate or close closes it
        self._manifest.write(json.dumps(record).encode() + b"\n")

    def rotate_manifest(self, suffix: str) -> None:
        if self._manifest is None:
            return
        self._manifest.close()
        os.replace(self._path("manifest.jsonl"), self._path("manifest." + suffix))
        self._manifest = None

    def close(self) -> None:
        self.thread.stop()
        for step in list(self._steps):
            self.end_step(step)
        if self._manifest is not None:
            self._manifest.close()
            self._manifest = None
