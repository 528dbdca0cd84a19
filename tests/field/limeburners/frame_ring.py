"""Renderer for training-run visualisations: frames in flight, image views, timeline points.

The back end is a thin layer over a GPU API.  Swapchain images are acquired and presented, command buffers are
begun and ended, image views are counted.
"""
from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Callable, DefaultDict, Dict, List, Optional, Set


class Swapchain:
    def __init__(self, images: int):
        self._available = list(range(images))
        self.width, self.height = 1280, 720

    def acquire_image(self) -> Optional[int]:
        return self._available.pop(0) if self._available else None

    def present(self, image: int) -> None:
        self._available.append(image)

    def abandon(self, image: int) -> None:
        self._available.append(image)


class CommandPool:
    def __init__(self, size: int):
        self._idle = [CommandBuffer(i) for i in range(size)]

    def begin(self) -> "CommandBuffer":
        cb = self._idle.pop()
        cb.ops.clear()
        return cb

    def recycle(self, cb: "CommandBuffer") -> None:
        self._idle.append(cb)


class CommandBuffer:
    def __init__(self, ident: int):
        self.ident = ident
        self.ops: List[tuple] = []

    def draw(self, what: str, *args: Any) -> None:
        self.ops.append((what, args))


class ViewTable:
    """Image views by name, with a count of users; a view is destroyed when nobody uses it."""

    def __init__(self):
        self._users: DefaultDict[str, int] = defaultdict(int)
        self._views: Dict[str, object] = {}

    def retain(self, name: str) -> object:
        if name not in self._views:
            self._views[name] = object()
        self._users[name] += 1
        return self._views[name]

    def release(self, name: str) -> None:
        self._users[name] -= 1
        if self._users[name] == 0:
            del self._views[name]
            del self._users[name]


@dataclass
class Frame:
    image: int
    commands: CommandBuffer
    textures: List[str] = field(default_factory=list)
    overlay: Optional[CommandBuffer] = None
    legend: Optional[CommandBuffer] = None


class Renderer:
    FRAMES = 2

    def __init__(self, swap: Swapchain, pool: CommandPool, views: ViewTable):
        self.swap = swap
        self.pool = pool
        self.views = views
        self.flight: List[Frame] = []
        self.minimised = False
        self._captures: Set[str] = set()

    def begin_frame(self) -> Optional[Frame]:
        """Ended by end_frame or cancel_frame."""
        if len(self.flight) >= self.FRAMES:
            self.retire_oldest()
        image = self.swap.acquire_image()  # leak: the minimised window returns without abandoning it
        if image is None:
            return None
        if self.minimised:
            return None
        cb = self.pool.begin()  # clean: in the frame, recycled at retirement or cancellation
        cb.draw("clear", 0.1, 0.1, 0.1)
        return Frame(image, cb)

    def end_frame(self, frame: Frame) -> None:
        self.swap.present(frame.image)
        self.flight.append(frame)

    def cancel_frame(self, frame: Frame) -> None:
        self.swap.abandon(frame.image)
        self._scrap(frame)

    def retire_oldest(self) -> None:
        self._scrap(self.flight.pop(0))

    def _scrap(self, frame: Frame) -> None:
        self.pool.recycle(frame.commands)
        if frame.overlay is not None:
            self.pool.recycle(frame.overlay)
            frame.overlay = None
        if frame.legend is not None:
            self.pool.recycle(frame.legend)
            frame.legend = None
        for name in frame.textures:
            self.views.release(name)
        frame.textures.clear()

    def bind(self, frame: Frame, name: str) -> None:
        self.views.retain(name)  # clean: near miss, listed in the frame, whose scrapping releases it
        frame.textures.append(name)
        frame.commands.draw("bind", name)

    def bind_unique(self, frame: Frame, name: str) -> None:
        self.views.retain(name)  # leak: a name bound before is not listed again, yet counted again
        if name not in frame.textures:
            frame.textures.append(name)
        frame.commands.draw("bind", name)

    def overlay(self, frame: Frame, text: str) -> None:
        if frame.overlay is None:
            frame.overlay = self.pool.begin()  # clean: recycled with the frame
        frame.overlay.draw("text", text)

    def legend(self, frame: Frame, entries: List[str]) -> None:
        """Laid out again whenever the entries change."""
        frame.legend = self.pool.begin()  # leak: a second legend of the frame overwrites the first
        for row, entry in enumerate(entries):
            frame.legend.draw("label", row, entry)

    def draw_curves(self, curves: Dict[str, List[float]]) -> int:
        frame = self.begin_frame()  # leak: with nothing drawn it is neither ended nor cancelled
        if frame is None:
            return 0
        drawn = 0
        for name, points in curves.items():
            if len(points) < 2:
                continue
            frame.commands.draw("polyline", name, points)
            drawn += 1
        if drawn:
            self.end_frame(frame)
        return drawn

    def animate(self, scenes: List[Callable[[Frame], bool]]) -> int:
        shown = 0
        for scene in scenes:
            frame = self.begin_frame()  # clean: near miss, end or cancel in either branch
            if frame is None:
                break
            finish = self.end_frame if scene(frame) else self.cancel_frame
            finish(frame)
            shown += 1
        return shown

    def capture(self, name: str) -> bool:
        """A view is kept for the recorder until stop_capture."""
        if name in self._captures:
            return False
        self.views.retain(name)  # clean: near miss, stop_capture goes through the names
        self._captures.add(name)
        return True

    def stop_capture(self) -> int:
        n = len(self._captures)
        while self._captures:
            self.views.release(self._captures.pop())
        return n

    def close(self) -> None:
        self.stop_capture()
        while self.flight:
            self.retire_oldest()


class Thumbnailer:
    """Renders off-screen in a thread of its own, one command buffer per job."""

    def __init__(self, pool: CommandPool, views: ViewTable):
        self.pool = pool
        self.views = views
        self._jobs: Dict[str, CommandBuffer] = {}
        self._guard = threading.Lock()

    def enqueue(self, name: str, scale: float) -> bool:
        self._guard.acquire()  # leak: the return for a known name leaves it locked
        if name in self._jobs:
            return False
        cb = self.pool.begin()  # clean: near miss, in _jobs until collect recycles it
        cb.draw("blit", name, scale)
        self._jobs[name] = cb
        self._guard.release()
        return True

    def collect(self, name: str) -> int:
        self._guard.acquire()  # clean: released in finally
        try:
            cb = self._jobs.pop(name, None)
        finally:
            self._guard.release()
        if cb is None:
            return 0
        n = len(cb.ops)
        self.pool.recycle(cb)
        return n

    def cancel_all(self) -> None:
        with self._guard:
            for cb in self._jobs.values():
                self.pool.recycle(cb)
            self._jobs.clear()

    def estimate(self, names: List[str]) -> Dict[str, int]:
        """Dry run: what would be drawn."""
        sizes = {}
        cb = self.pool.begin()  # leak: begun anew for every name, only the last one is recycled
        for name in names:
            cb = self.pool.begin()  # leak: overwritten by the next turn
            cb.draw("blit", name, 1.0)
            sizes[name] = len(cb.ops)
        self.pool.recycle(cb)
        return sizes
