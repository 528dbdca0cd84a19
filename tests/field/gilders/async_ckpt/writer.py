"""Background writer: drains staged copies to files."""
from __future__ import annotations

import json
import logging
import os
import queue
import threading
from typing import Dict, List, Optional

from .staging import StagedCopy

log = logging.getLogger(__name__)
_STOP = object()


class ShardFile:
    def __init__(self, path: str):
        self.path = path
        self._fh = open(path + ".tmp", "wb")  # clean: owned by the object, commit and abort close it

    def write(self, data) -> None:
        self._fh.write(data)

    def commit(self) -> None:
        self._fh.flush()
        self._fh.close()
        os.replace(self.path + ".tmp", self.path)

    def abort(self) -> None:
        self._fh.close()
        os.unlink(self.path + ".tmp")


class ShardWriter:
    def __init__(self, folder: str):
        self.folder = folder
        self._queue: "queue.Queue" = queue.Queue()
        self._thread: Optional[threading.Thread] = None
        self.failed: List[str] = []

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, copy: StagedCopy) -> None:
        self._queue.put(copy)

    def stop(self) -> None:
        self._queue.put(_STOP)
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            if item is _STOP:
                return
            try:
                self._write_one(item)
            except OSError as exc:
                log.error("shard %s: %s", item.name, exc)
                self.failed.append(item.name)
            finally:
                item.release()

    def _write_one(self, copy: StagedCopy) -> None:
        out = ShardFile(os.path.join(self.folder, copy.name))  # leak: an OSError from write is survived by _run and leaves the file open
        out.write(copy.view())
        out.commit()

    def write_checked(self, name: str, chunks: List[bytes]) -> bool:
        out = ShardFile(os.path.join(self.folder, name))  # clean: near miss, every way ends in commit or abort
        try:
            for chunk in chunks:
                out.write(chunk)
        except (OSError, TypeError):
            out.abort()
            return False
        if not chunks:
            out.abort()
            return False
        out.commit()
        return True

    def append_index(self, entries: Dict[str, int]) -> int:
        path = os.path.join(self.folder, "index.json")
        fh = open(path, "a+")  # leak: the empty-entries return leaves it open
        if not entries:
            return 0
        fh.write(json.dumps(entries) + "\n")
        fh.close()
        return len(entries)

    def read_index(self) -> Dict[str, int]:
        path = os.path.join(self.folder, "index.json")
        merged: Dict[str, int] = {}
        try:
            fh = open(path)  # clean: near miss, a missing file opens nothing, otherwise the finally below closes it
        except FileNotFoundError:
            return merged
        try:
            for line in fh:
                if not line.strip():
                    continue
                merged.update(json.loads(line))
        finally:
            fh.close()
        return merged

    def last_index_line(self) -> str:
        line = ""
        for line in open(os.path.join(self.folder, "index.json")):  # leak: the file object is never closed
            pass
        return line
