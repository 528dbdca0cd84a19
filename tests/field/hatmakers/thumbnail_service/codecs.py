"""Decoder contexts are expensive, therefore they are parked between requests."""
from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Iterator, Optional


@dataclass
class Context:
    format: str
    number: int
    pictures: int = 0
    poisoned: bool = False

    def decode(self, data: bytes) -> list[int]:
        self.pictures += 1
        return list(data[:64])

    def probe(self, data: bytes) -> tuple[int, int]:
        return len(data) % 4096, len(data) % 2160


class ContextPark:
    FORMATS = ("jpeg", "webp", "avif")

    def __init__(self, per_format: int) -> None:
        self._lock = threading.Lock()
        self._parked = {f: [Context(f, n) for n in range(per_format)] for f in self.FORMATS}

    def unpark(self, fmt: str) -> Optional[Context]:
        with self._lock:
            shelf = self._parked.get(fmt)
            return shelf.pop() if shelf else None

    def park(self, context: Context) -> None:
        with self._lock:
            if context.poisoned:
                context = Context(context.format, context.number)
            self._parked[context.format].append(context)

    def unpark_any(self, formats: tuple[str, ...]) -> Optional[Context]:
        for fmt in formats:
            context = self.unpark(fmt)  # clean: the first one there is goes to the caller
            if context is not None:
                return context
        return None

    @contextmanager
    def context(self, fmt: str) -> Iterator[Optional[Context]]:
        context = self.unpark(fmt)  # clean: parked in finally where there is one
        try:
            yield context
        finally:
            if context is not None:
                self.park(context)

    @contextmanager
    def counted(self, fmt: str, quota: int) -> Iterator[Optional[Context]]:
        """Yields None to requests over the quota of pictures per context."""
        context = self.unpark(fmt)  # leak: over the quota the generator returns after the yield without park
        if context is None:
            yield None
            return
        if context.pictures >= quota:
            yield None
            return
        try:
            yield context
        finally:
            self.park(context)
