from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import shared_memory
from typing import Dict, Iterator, Optional


@dataclass(frozen=True)
class SegmentRef:
    name: str
    nbytes: int


class SegmentStore:
    """Attaches input segments that the API process wrote."""

    def __init__(self, limit: int = 64) -> None:
        self.limit = limit
        self._attached: Dict[str, shared_memory.SharedMemory] = {}
        self._counts: Dict[str, int] = {}

    def attach(self, ref: SegmentRef) -> Optional[memoryview]:
        if ref.name not in self._attached:
            if len(self._attached) >= self.limit:
                return None
            self._attached[ref.name] = shared_memory.SharedMemory(ref.name)  # clean: near miss, kept with a count, detach closes it at zero
            self._counts[ref.name] = 0
        self._counts[ref.name] += 1
        return self._attached[ref.name].buf[: ref.nbytes]

    def detach(self, ref: SegmentRef, view: memoryview) -> None:
        view.release()
        self._counts[ref.name] -= 1
        if self._counts[ref.name] == 0:
            del self._counts[ref.name]
            self._attached.pop(ref.name).close()

    @contextmanager
    def viewing(self, ref: SegmentRef) -> Iterator[Optional[memoryview]]:
        view = self.attach(ref)  # clean: near miss, detached in the finally when there is a view
        try:
            yield view
        finally:
            if view is not None:
                self.detach(ref, view)
