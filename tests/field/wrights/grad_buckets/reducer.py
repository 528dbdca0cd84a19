from __future__ import annotations

import logging
import math
from functools import partial

from .buffers import Flat, FlatBuffers
from .comm import Handle, LoopbackGroup

logger = logging.getLogger(__name__)


class Reducer:
    def __init__(self, buffers: FlatBuffers, group: LoopbackGroup, track_norms: bool = False) -> None:
        self.buffers = buffers
        self.group = group
        self.grads: dict[str, list[float]] = {}
        self.bucket: Flat | None = None
        self.works: list[Handle] = []
        self.sync = True
        self.track_norms = track_norms
        self.norms: Flat | None = None

    def begin_step(self) -> None:
        if self.track_norms:
            self.norms = self.buffers.fetch()  # clean: near miss, end_step() stores it under the same flag, which is set once

    def end_step(self) -> None:
        if self.track_norms:
            self.buffers.store(self.norms)
            self.norms = None

    def step(self, grads: dict[str, list[float]]) -> None:
        self.begin_step()
        for name, grad in grads.items():
            self.add(name, grad)
            if self.norms is not None:
                self.norms.push(name, [math.sqrt(sum(g * g for g in grad))])
        self.finalize()
        self.end_step()

    # bucketed path

    def add(self, name: str, grad: list[float]) -> None:
        if self.bucket is not None and self.bucket.room() < len(grad):
            self._launch()
        if self.bucket is None:
            self.bucket = self.buffers.fetch()  # clean: near miss, _launch moves it into a work, finalize() stores it
        self.bucket.push(name, grad)

    def _launch(self) -> None:
        flat, self.bucket = self.bucket, None
        self.works.append(self.group.all_reduce(flat))

    def finalize(self) -> None:
        if self.bucket is not None:
            self._launch()
        for work in self.works:
            flat = work.wait()
            self._scatter(flat)
            self.buffers.store(flat)
        self.works.clear()

    def _scatter(self, flat: Flat) -> None:
        for name, a, b in flat.spans:
            self.grads[name] = [v / self.group.world for v in flat.values[a:b]]

    # hook path

    def _on_done(self, handle: Handle) -> None:
        self._scatter(handle.flat)
        self.buffers.store(handle.flat)

    def _on_done_checked(self, limit: float, handle: Handle) -> None:
        norm = math.sqrt(sum(v * v for v in handle.flat.values))
        if norm > limit:
            logger.warning("skipping bucket, norm %.3f", norm)
            return
        self._scatter(handle.flat)
        self.buffers.store(handle.flat)

    def reduce_async(self, name: str, grad: list[float]) -> None:
        flat = self.buffers.fetch()  # clean: near miss, the done callback stores it
        flat.push(name, grad)
        self.group.all_reduce(flat).add_done_callback(self._on_done)

    def reduce_clipped(self, name: str, grad: list[float], limit: float) -> None:
        flat = self.buffers.fetch()  # leak: the callback returns early for a bucket over the limit
        flat.push(name, grad)
        self.group.all_reduce(flat).add_done_callback(partial(self._on_done_checked, limit))

    def reduce_if_sync(self, name: str, grad: list[float]) -> None:
        flat = self.buffers.fetch()  # leak: without sync the gradient is kept but the buffer is not stored
        flat.push(name, grad)
        if not self.sync:
            self.grads[name] = list(grad)
            return
        self.group.all_reduce(flat).add_done_callback(self._on_done)

    # statistics

    def _flatten(self) -> Flat:
        flat = self.buffers.fetch()  # clean: the caller's
        for name, grad in self.grads.items():
            if flat.room() >= len(grad):
                flat.push(name, grad)
        return flat

    def flat_copy(self) -> list[float]:
        flat = self._flatten()  # leak: the values are copied out and the buffer is dropped
        return flat.values[: self.buffers.numel - flat.room()]

    def norm(self) -> float:
        flat = self._flatten()  # clean: stored after use
        end = self.buffers.numel - flat.room()
        total = math.sqrt(sum(v * v for v in flat.values[:end]))
        self.buffers.store(flat)
        return total

    def broadcast(self, names: list[str]) -> int:
        pending: dict[str, Flat] = {}
        for name in names:
            flat = self.buffers.fetch()  # leak: a name given twice overwrites the entry of the first
            if name not in self.grads:
                self.buffers.store(flat)
                continue
            flat.push(name, self.grads[name])
            pending[name] = flat
        for flat in pending.values():
            self.group.all_reduce(flat).wait()
            self.buffers.store(flat)
        return len(pending)
