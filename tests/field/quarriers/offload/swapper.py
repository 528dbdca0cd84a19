from __future__ import annotations

import logging
from typing import Any, Callable, Optional

from .pinned import PinnedArena, PinnedBuffer, StreamPool

log = logging.getLogger(__name__)
CopyFn = Callable[[Any, Any, Any], None]


class CopyError(RuntimeError):
    pass


class StagingScope:
    """A staging buffer and a copy stream for the length of a with block."""

    def __init__(self, arena: PinnedArena, streams: StreamPool) -> None:
        self.arena = arena
        self.streams = streams
        self.buf: Optional[PinnedBuffer] = None
        self.stream: Any = None

    def __enter__(self) -> "StagingScope":
        self.stream = self.streams.get_stream()  # leak: __exit__ returns before put_stream after a CopyError
        self.buf = self.arena.pin(wait=True)  # clean: unpinned first in __exit__
        return self

    def __exit__(self, exc_type, exc, tb) -> bool:
        if self.buf is not None:
            self.arena.unpin(self.buf)
            self.buf = None
        if exc_type is not None and issubclass(exc_type, CopyError):
            log.warning("copy failed: %s", exc)
            return True
        self.streams.put_stream(self.stream)
        self.stream = None
        return False


class StreamScope:
    def __init__(self, streams: StreamPool) -> None:
        self.streams = streams

    def __enter__(self) -> Any:
        self.stream = self.streams.get_stream()  # clean: near miss, __exit__ gives it back before it returns early
        return self.stream

    def __exit__(self, exc_type, exc, tb) -> bool:
        self.streams.put_stream(self.stream)
        if exc_type is None:
            return False
        return issubclass(exc_type, CopyError)


class LayerSwapper:
    def __init__(self, arena: PinnedArena, streams: StreamPool, copy: CopyFn) -> None:
        self.arena = arena
        self.streams = streams
        self.copy = copy
        self._host: dict[str, PinnedBuffer] = {}
        self._pending: dict[str, tuple[PinnedBuffer, Any]] = {}

    def swap_out(self, name: str, weight: Any) -> bool:
        if name in self._host:
            return True
        buf = self.arena.try_pin()  # clean: near miss, kept in _host, or unpinned after the with swallowed a CopyError
        if buf is None:
            return False
        with StreamScope(self.streams) as stream:  # clean: with
            self.copy(weight, buf.data, stream)
            self._host[name] = buf
            return True
        self.arena.unpin(buf)
        return False

    def swap_in(self, name: str, weight: Any) -> None:
        buf = self._host.pop(name)
        stream = self.streams.get_stream()  # clean: finally
        try:
            self.copy(buf.data, weight, stream)
        finally:
            self.streams.put_stream(stream)
            self.arena.unpin(buf)

    def begin_prefetch(self, name: str, src: Any) -> bool:
        if name in self._pending or name in self._host:
            return False
        stream = self.streams.get_stream()  # leak: no rollback when the arena is empty
        buf = self.arena.try_pin()  # clean: stored in _pending
        if buf is None:
            return False
        self.copy(src, buf.data, stream)
        self._pending[name] = (buf, stream)
        return True

    def finish_prefetch(self, name: str) -> Optional[PinnedBuffer]:
        """The buffer stays registered under its name; the stream goes back."""
        if name not in self._pending:
            return None
        buf, stream = self._pending.pop(name)
        self.streams.put_stream(stream)
        self._host[name] = buf
        return buf

    def mirror(self, src: Any, dst: Any) -> bool:
        first = self.arena.try_pin()  # clean: near miss, unpinned on every way
        second = self.arena.try_pin()  # leak: not unpinned when first is None
        if first is None:
            return False
        if second is None:
            self.arena.unpin(first)
            return False
        try:
            self.copy(src, first.data, None)
            self.copy(first.data, second.data, None)
            self.copy(second.data, dst, None)
        finally:
            self.arena.unpin(first)
            self.arena.unpin(second)
        return True

    def checksum(self, src: Any, digest: Callable[[Any], int]) -> Optional[int]:
        buf = self.arena.try_pin()  # leak: a survived CopyError returns without unpin
        if buf is None:
            return None
        try:
            self.copy(src, buf.data, None)
        except CopyError:
            return None
        value = digest(buf.data)
        self.arena.unpin(buf)
        return value

    def flush(self, sink: Callable[[str, PinnedBuffer], None]) -> None:
        with StagingScope(self.arena, self.streams) as scope:  # clean: with, the fault is the scope's own
            for name in list(self._host):
                buf = self._host.pop(name)
                try:
                    sink(name, buf)
                finally:
                    self.arena.unpin(buf)
            log.debug("flushed on %r", scope.stream)
