"""Admission to the render farm: the ticket is a future, and completing it frees the place."""
from __future__ import annotations

import logging
import threading
from concurrent.futures import Future

log = logging.getLogger(__name__)


class Gate:
    """enter() gives a future; once it is done, with whatever outcome, the place is free for the next."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._inside = 0
        self._cond = threading.Condition()

    def enter(self) -> Future:
        with self._cond:
            while self._inside >= self._places:
                self._cond.wait()
            self._inside += 1
        ticket: Future = Future()
        ticket.add_done_callback(self._left)
        return ticket

    def enter_now(self) -> Future | None:
        with self._cond:
            if self._inside >= self._places:
                return None
            self._inside += 1
        ticket: Future = Future()
        ticket.add_done_callback(self._left)
        return ticket

    def _left(self, _ticket: Future) -> None:
        with self._cond:
            self._inside -= 1
            self._cond.notify()


class Scene:
    def __init__(self, path: str, frames: int) -> None:
        self.path = path
        self.frames = frames


class Farm:
    def __init__(self, gate: Gate, nodes) -> None:
        self.gate = gate
        self.nodes = nodes
        self.running: dict[str, Future] = {}

    def render(self, scene: Scene) -> int:
        ticket = self.gate.enter()  # clean: completed with a result or with the exception
        try:
            frames = self.nodes.render(scene.path, 0, scene.frames)
        except OSError as exc:
            ticket.set_exception(exc)
            return 0
        ticket.set_result(frames)
        return frames

    def preview(self, scene: Scene) -> bytes | None:
        ticket = self.gate.enter_now()  # leak: an empty scene returns with the ticket not done
        if ticket is None:
            return None
        if scene.frames == 0:
            log.info("%s is empty", scene.path)
            return None
        image = self.nodes.still(scene.path, scene.frames // 2)
        ticket.set_result(image)
        return image

    def thumbnail(self, scene: Scene) -> bytes | None:
        ticket = self.gate.enter_now()  # clean: near miss, the empty scene cancels the ticket
        if ticket is None:
            return None
        if scene.frames == 0:
            ticket.cancel()
            return None
        image = self.nodes.still(scene.path, 0)
        ticket.set_result(image)
        return image

    def submit(self, scene: Scene) -> Future:
        if scene.path in self.running:
            return self.running[scene.path]
        ticket = self.gate.enter()  # clean: near miss, kept in running, completed by on_finished
        self.running[scene.path] = ticket
        self.nodes.start(scene.path, scene.frames)
        return ticket

    def on_finished(self, path: str, frames: int) -> None:
        ticket = self.running.pop(path, None)
        if ticket is not None:
            ticket.set_result(frames)

    def on_node_lost(self, path: str) -> None:
        ticket = self.running.pop(path, None)
        if ticket is not None:
            ticket.set_exception(ConnectionError(path))

    def render_range(self, scenes: list[Scene]) -> int:
        frames = 0
        for scene in scenes:
            ticket = self.gate.enter()  # leak: a cached scene goes on with its ticket open
            if self.nodes.cached(scene.path):
                frames += scene.frames
                continue
            frames += self.nodes.render(scene.path, 0, scene.frames)
            ticket.set_result(frames)
        return frames

    def render_missing(self, scenes: list[Scene]) -> int:
        frames = 0
        for scene in scenes:
            if self.nodes.cached(scene.path):
                continue
            ticket = self.gate.enter()  # clean: near miss, taken after the continue, completed
            frames += self.nodes.render(scene.path, 0, scene.frames)
            ticket.set_result(frames)
        return frames

    def split(self, scene: Scene) -> int:
        half = scene.frames // 2
        tickets = [self.gate.enter_now() for _ in range(2)]  # clean: near miss, each that came is completed
        done = 0
        if all(t is not None for t in tickets):
            done += self.nodes.render(scene.path, 0, half)
            done += self.nodes.render(scene.path, half, scene.frames)
        for ticket in tickets:
            if ticket is not None:
                ticket.set_result(done)
        return done
