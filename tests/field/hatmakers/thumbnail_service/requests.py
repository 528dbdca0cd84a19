"""Request handling: one queue, several stages, each stage hands its leases to the next."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Optional

from .codecs import Context, ContextPark
from .surfaces import ByteBudget, Surface, SurfaceCache

log = logging.getLogger("thumbs")


@dataclass
class Request:
    key: str
    fmt: str
    data: bytes
    context: Optional[Context] = None
    surface: Optional[Surface] = None
    failed: bool = False


class Thumbnails:
    def __init__(self, park: ContextPark, cache: SurfaceCache, budget: ByteBudget) -> None:
        self.park = park
        self.cache = cache
        self.budget = budget
        self._decoding: deque[Request] = deque()
        self._viewers: dict[str, list[Surface]] = {}

    # direct path -------------------------------------------------------------------------------------------
    def thumbnail(self, key: str, fmt: str, data: bytes) -> list[int]:
        surface = self.cache.look(key)  # clean: done after the copy
        if surface is not None:
            pixels = list(surface.pixels)
            self.cache.done(surface)
            return pixels
        with self.park.context(fmt) as context:  # clean: context manager parks
            if context is None:
                return []
            pixels = context.decode(data)
        self.cache.store(key, pixels)
        return pixels

    def dimensions(self, fmt: str, data: bytes) -> tuple[int, int]:
        context = self.park.unpark(fmt)  # leak: pictures without a width return before the park
        if context is None:
            return 0, 0
        width, height = context.probe(data)
        if width == 0:
            return 0, height
        self.park.park(context)
        return width, height

    def is_cached(self, keys: list[str]) -> dict[str, bool]:
        known: dict[str, bool] = {}
        for key in keys:
            known[key] = self.cache.look(key) is not None  # leak: pinned only to be compared with None
        return known

    def oldest(self, keys: list[str]) -> Optional[str]:
        pinned = [s for key in keys if (s := self.cache.look(key)) is not None]  # clean: all are done below
        try:
            if not pinned:
                return None
            return min(pinned, key=lambda s: s.stamp).key
        finally:
            for surface in pinned:
                self.cache.done(surface)

    def decode_isolated(self, fmt: str, data: bytes) -> list[int]:
        context = self.park.unpark(fmt)  # clean: near miss, park() itself replaces a poisoned one
        if context is None:
            return []
        pixels = context.decode(data)
        if not pixels:
            context.poisoned = True
        self.park.park(context)
        return pixels

    def decode_large(self, fmt: str, data: bytes) -> Optional[list[int]]:
        need = 4 * len(data)
        if not self.budget.charge(need):  # leak: where no context is parked the bytes stay charged
            return None
        context = self.park.unpark(fmt)  # clean: parked after the decode
        if context is None:
            log.info("no %s context", fmt)
            return None
        pixels = context.decode(data)
        self.park.park(context)
        self.budget.credit(need)
        return pixels

    def decode_huge(self, fmt: str, data: bytes) -> Optional[list[int]]:
        need = 8 * len(data)
        charged = self.budget.charge(need)  # clean: near miss, credited under the same flag
        with self.park.context(fmt) as context:  # clean: context manager parks
            pixels = context.decode(data if charged else data[:16]) if context is not None else None
        if charged:
            self.budget.credit(need)
        return pixels

    def transcode(self, source: str, target: str, data: bytes) -> Optional[list[int]]:
        reader = self.park.unpark(source)  # clean: parked on each way
        if reader is None:
            return None
        writer = self.park.unpark_any((target, "jpeg"))  # leak: parked only where its format is the wanted one
        if writer is None:
            self.park.park(reader)
            return None
        pixels = reader.decode(data)
        self.park.park(reader)
        if writer.format != target:
            return pixels
        result = writer.decode(bytes(p % 256 for p in pixels))
        self.park.park(writer)
        return result

    # staged path -------------------------------------------------------------------------------------------
    def enqueue(self, request: Request) -> bool:
        request.context = self.park.unpark(request.fmt)  # clean: near miss, decode_next() and abandon() park it
        if request.context is None:
            return False
        self._decoding.append(request)
        return True

    def decode_next(self) -> Optional[Request]:
        if not self._decoding:
            return None
        request = self._decoding.popleft()
        context, request.context = request.context, None
        pixels = context.decode(request.data)
        self.park.park(context)
        request.failed = not pixels or not self.cache.store(request.key, pixels)
        return request

    def abandon(self) -> int:
        count = len(self._decoding)
        while self._decoding:
            request = self._decoding.popleft()
            self.park.park(request.context)
            request.context = None
        return count

    # viewers -----------------------------------------------------------------------------------------------
    def show(self, viewer: str, key: str) -> Optional[list[int]]:
        surface = self.cache.look(key)  # leak: hide() ends only the newest surface of the viewer's list
        if surface is None:
            return None
        self._viewers.setdefault(viewer, []).append(surface)
        return surface.pixels

    def hide(self, viewer: str) -> bool:
        shown = self._viewers.pop(viewer, [])
        if not shown:
            return False
        self.cache.done(shown[-1])
        return True
