"""Reference counted handles of native media objects, shared between players, recorders and the thumbnailer."""
from __future__ import annotations

import functools
import logging
import threading
import weakref
from dataclasses import dataclass
from typing import Any, Callable, Generic, Optional, TypeVar

log = logging.getLogger("media.handles")
T = TypeVar("T")


class Handle(Generic[T]):
    def __init__(self, registry: "HandleRegistry", name: str, value: T) -> None:
        self.registry = registry
        self.name = name
        self.value = value
        self.count = 0


class HandleRegistry:
    """acquire() creates or shares; release() destroys at zero."""

    def __init__(self, factory: Callable[[str], Any], destroy: Callable[[Any], None]) -> None:
        self._factory = factory
        self._destroy = destroy
        self._lock = threading.RLock()
        self._handles: dict[str, Handle] = {}

    def acquire(self, name: str) -> Handle:
        with self._lock:
            handle = self._handles.get(name)
            if handle is None:
                handle = self._handles[name] = Handle(self, name, self._factory(name))
            handle.count += 1
            return handle

    def share(self, handle: Handle) -> Handle:
        with self._lock:
            handle.count += 1
            return handle

    def peek(self, name: str) -> Optional[Handle]:
        """Looks without counting."""
        return self._handles.get(name)

    def release(self, handle: Handle) -> None:
        with self._lock:
            handle.count -= 1
            if handle.count > 0:
                return
            self._handles.pop(handle.name, None)
            self._destroy(handle.value)


@dataclass
class Clip:
    path: str
    start: float
    end: float


class Component:
    """Base of everything that works on one handle; close() gives it back."""

    def __init__(self, registry: HandleRegistry) -> None:
        self.registry = registry
        self.handle: Optional[Handle] = None

    def attach(self, name: str) -> None:
        self.detach()
        self.handle = self.registry.acquire(name)  # clean: near miss, detach() releases what was attached

    def detach(self) -> None:
        if self.handle is not None:
            self.registry.release(self.handle)
            self.handle = None

    def close(self) -> None:
        self.detach()


class Player(Component):
    def __init__(self, registry: HandleRegistry) -> None:
        super().__init__(registry)
        self.position = 0.0
        self.subtitle: Optional[Handle] = None

    def load_subtitle(self, name: str) -> None:
        if self.subtitle is not None:
            self.registry.release(self.subtitle)
        self.subtitle = self.registry.acquire(name)  # clean: near miss, the override of close() releases it

    def close(self) -> None:
        if self.subtitle is not None:
            self.registry.release(self.subtitle)
            self.subtitle = None
        super().close()

    def seek(self, clip: Clip) -> bool:
        handle = self.registry.acquire(clip.path)  # leak: a position outside the clip returns without release
        if not clip.start <= self.position <= clip.end:
            self.position = clip.start
            return False
        log.debug("%s at %.1f", handle.name, self.position)
        self.registry.release(handle)
        return True


class Recorder(Component):
    def __init__(self, registry: HandleRegistry) -> None:
        super().__init__(registry)
        self.sink: Optional[Handle] = None
        self.written = 0

    def start(self, name: str) -> None:
        if self.sink is None:
            self.sink = self.registry.acquire(name)  # leak: this class's close() lets the sink go without release

    def write(self, data: bytes) -> None:
        if self.sink is not None:
            self.sink.value.write(data)
            self.written += len(data)

    def close(self) -> None:
        self.sink = None
        self.written = 0
        super().close()


class Relay(Component):
    """Changes its handle under way."""

    def switch(self, name: str) -> None:
        fresh = self.registry.acquire(name)  # clean: near miss, replaces the released one, close() ends it
        old, self.handle = self.handle, fresh
        if old is not None:
            self.registry.release(old)

    def fork(self) -> "Relay":
        other = Relay(self.registry)
        if self.handle is not None:
            other.handle = self.registry.share(self.handle)  # clean: near miss, the other relay's close() releases it
        return other


def cached_duration(registry: HandleRegistry, name: str) -> Callable:
    """Decorator: the function sees the value, its result is remembered by position."""
    known: dict[tuple, float] = {}

    def wrap(function: Callable[..., float]) -> Callable[..., float]:
        @functools.wraps(function)
        def call(*args: Any) -> float:
            handle = registry.acquire(name)  # leak: a remembered result returns before the release
            if args in known:
                return known[args]
            known[args] = function(handle.value, *args)
            registry.release(handle)
            return known[args]

        return call

    return wrap


class Thumbnailer:
    def __init__(self, registry: HandleRegistry) -> None:
        self.registry = registry
        self._watched: dict[str, Handle] = {}

    def _open(self, clip: Clip) -> Handle:
        log.debug("open %s", clip.path)
        return self.registry.acquire(clip.path)  # clean: handed to the caller

    def _open_valid(self, clip: Clip) -> Optional[Handle]:
        handle = self._open(clip)  # clean: near miss, released where it isn't usable, else handed on
        if getattr(handle.value, "frames", 0) == 0:
            self.registry.release(handle)
            return None
        return handle

    def strip(self, clip: Clip, count: int) -> list[bytes]:
        handle = self._open_valid(clip)  # leak: a clip shorter than the count returns with the handle counted
        if handle is None:
            return []
        length = clip.end - clip.start
        if length < count:
            return [bytes(handle.value.frame(clip.start))]
        pictures = [bytes(handle.value.frame(clip.start + i * length / count)) for i in range(count)]
        self.registry.release(handle)
        return pictures

    def is_open(self, clip: Clip) -> bool:
        handle = self.registry.peek(clip.path)
        return handle is not None and handle.count > 0

    def watch(self, clip: Clip) -> None:
        if clip.path not in self._watched:
            self._watched[clip.path] = self._open(clip)  # clean: near miss, unwatch() and clear() release

    def unwatch(self, clip: Clip) -> None:
        handle = self._watched.pop(clip.path, None)
        if handle is not None:
            self.registry.release(handle)

    def clear(self) -> None:
        for handle in list(self._watched.values()):
            self.registry.release(handle)
        self._watched.clear()

    def lend(self, clip: Clip, user: Any) -> Any:
        handle = self._open(clip)  # clean: near miss, a finalizer of the user releases it
        weakref.finalize(user, self.registry.release, handle)
        return handle.value

    def compare(self, clips: list[Clip]) -> Optional[str]:
        """Path of the clip with the most frames."""
        best: Optional[Handle] = None
        for clip in clips:
            handle = self._open(clip)  # leak: the loser of every comparison stays counted
            if best is None or handle.value.frames > best.value.frames:
                best = handle
        if best is None:
            return None
        self.registry.release(best)
        return best.name
