"""Background writer: takes over segments and detaches them once they are on disk."""
from __future__ import annotations

import os
import queue
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import List, Optional

from .segments import Segment, SegmentPool


@dataclass
class WriteRequest:
    path: Path
    segments: List[Segment] = field(default_factory=list)

    def nbytes(self) -> int:
        return sum(s.used for s in self.segments)


class AsyncWriter:
    def __init__(self, pool: SegmentPool) -> None:
        self.pool = pool
        self._requests: "queue.Queue[Optional[WriteRequest]]" = queue.Queue()
        self._thread: Optional[threading.Thread] = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def submit(self, request: WriteRequest) -> None:
        self._requests.put(request)

    def _loop(self) -> None:
        while True:
            request = self._requests.get()
            if request is None:
                return
            self.write(request)

    def write(self, request: WriteRequest) -> None:
        tmp = request.path.with_suffix(".tmp")
        with open(tmp, "wb") as fh:  # clean: closed by the with block
            for segment in request.segments:
                fh.write(segment.storage[: segment.used].numpy().tobytes())
                self.pool.detach(segment)
        request.segments = []
        os.replace(tmp, request.path)

    def cancel(self, request: WriteRequest) -> None:
        for segment in request.segments:
            self.pool.detach(segment)
        request.segments = []

    def append_note(self, path: Path, note: str) -> bool:
        fh = open(path, "a")  # leak: an empty note returns with the file open
        if not note:
            return False
        fh.write(note + "\n")
        fh.close()
        return True

    def stop(self) -> None:
        self._requests.put(None)
        if self._thread is not None:
            self._thread.join()
