"""Cache of image embeddings for a multimodal model; entries in use are not evicted."""
from __future__ import annotations

import hashlib
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Callable, Iterator, Optional


@dataclass(eq=False)
class Entry:
    key: str
    vectors: list[float] = field(default_factory=list)
    users: int = 0
    uses: int = 0


class EmbedCache:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._entries: dict[str, Entry] = {}
        self._guard = threading.RLock()

    def lookup(self, key: str) -> tuple[Entry, bool]:
        """The entry, counted as used by the caller, and whether it was there before."""
        with self._guard:
            entry = self._entries.get(key)
            hit = entry is not None
            if not hit:
                self._shrink()
                entry = self._entries[key] = Entry(key)
            entry.users += 1
            entry.uses += 1
            return entry, hit

    def peek(self, key: str) -> Optional[Entry]:
        with self._guard:
            entry = self._entries.get(key)
            if entry is not None:
                entry.users += 1
            return entry

    def done(self, entry: Entry) -> None:
        with self._guard:
            entry.users -= 1

    def _shrink(self) -> None:
        for key, entry in list(self._entries.items()):
            if len(self._entries) < self.capacity:
                break
            if entry.users == 0:
                del self._entries[key]


def digest(image: bytes) -> str:
    return hashlib.blake2b(image, digest_size=16).hexdigest()


class Encoder:
    def __init__(self, cache: EmbedCache) -> None:
        self.cache = cache
        self.encoded = 0

    def _run(self, image: bytes) -> list[float]:
        self.encoded += 1
        return [b / 255.0 for b in image[:64]]

    def embed(self, image: bytes) -> list[float]:
        entry, hit = self.cache.lookup(digest(image))  # leak: a hit counts a user and returns without done
        if hit:
            return list(entry.vectors)
        entry.vectors = self._run(image)
        result = list(entry.vectors)
        self.cache.done(entry)
        return result

    def embed_pooled(self, image: bytes) -> float:
        entry, hit = self.cache.lookup(digest(image))  # clean: near miss, hit and miss meet before done
        if not hit:
            entry.vectors = self._run(image)
        mean = sum(entry.vectors) / max(len(entry.vectors), 1)
        self.cache.done(entry)
        return mean

    def similarity(self, left: bytes, right: bytes) -> float | None:
        a = self.cache.peek(digest(left))  # leak: done only where the right one is cached as well
        b = self.cache.peek(digest(right))  # leak: done only where the left one is cached as well
        if a is None or b is None:
            return None
        score = sum(x * y for x, y in zip(a.vectors, b.vectors))
        self.cache.done(a)
        self.cache.done(b)
        return score

    def distance(self, left: bytes, right: bytes) -> float | None:
        a = self.cache.peek(digest(left))  # clean: near miss, each is done under its own test
        b = self.cache.peek(digest(right))  # clean: near miss, each is done under its own test
        result = None
        if a is not None and b is not None:
            result = sum((x - y) ** 2 for x, y in zip(a.vectors, b.vectors)) ** 0.5
        for entry in (a, b):
            if entry is not None:
                self.cache.done(entry)
        return result

    @contextmanager
    def borrowed(self, image: bytes) -> Iterator[Entry]:
        entry, hit = self.cache.lookup(digest(image))  # clean: near miss, the branch is about encoding alone
        try:
            if not hit:
                entry.vectors = self._run(image)
            yield entry
        finally:
            self.cache.done(entry)

    @contextmanager
    def warmed(self, image: bytes) -> Iterator[Optional[Entry]]:
        entry = self.cache.peek(digest(image))  # leak: an entry that is still empty is yielded as None and not done
        if entry is None or not entry.vectors:
            yield None
            return
        try:
            yield entry
        finally:
            self.cache.done(entry)

    def first_value(self, image: bytes) -> float:
        with self.borrowed(image) as entry:  # clean: the context manager calls done
            if not entry.vectors:
                return 0.0
            return entry.vectors[0]


Ready = Callable[[bool], None]


@dataclass
class Prompt:
    pid: str
    images: list[bytes]
    entries: list[Entry] = field(default_factory=list)


class PromptTable:
    """Entries stay counted from `prepare` to the end of the prompt's prefill."""

    def __init__(self, cache: EmbedCache) -> None:
        self.cache = cache
        self.waiting: dict[str, Prompt] = {}
        self.parked: dict[str, Prompt] = {}
        self.rejected = 0

    def prepare(self, prompt: Prompt) -> Ready:
        for image in prompt.images:
            entry, _hit = self.cache.lookup(digest(image))  # leak: on a failed prefill the callback drops the prompt
            prompt.entries.append(entry)
        self.waiting[prompt.pid] = prompt

        def finished(ok: bool) -> None:
            gone = self.waiting.pop(prompt.pid)
            if not ok:
                self.rejected += 1
                return
            for entry in gone.entries:
                self.cache.done(entry)

        return finished

    def park(self, prompt: Prompt) -> Ready:
        for image in prompt.images:
            entry, _hit = self.cache.lookup(digest(image))  # clean: near miss, the callback ends them before the test
            prompt.entries.append(entry)
        self.parked[prompt.pid] = prompt

        def finished(ok: bool) -> None:
            gone = self.parked.pop(prompt.pid)
            while gone.entries:
                self.cache.done(gone.entries.pop())
            if not ok:
                self.rejected += 1
                return
            gone.images.clear()

        return finished

    def all_cached(self, images: list[bytes]) -> bool:
        found = [e for img in images if (e := self.cache.peek(digest(img))) is not None]  # leak: a miss returns early
        if len(found) < len(images):
            return False
        for entry in found:
            entry.uses += 1
            self.cache.done(entry)
        return True

    def count_cached(self, images: list[bytes]) -> int:
        found = [e for img in images if (e := self.cache.peek(digest(img))) is not None]  # clean: near miss, all done
        for entry in found:
            self.cache.done(entry)
        return len(found)
