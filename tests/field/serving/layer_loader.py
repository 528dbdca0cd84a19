# Layer-by-layer KV loading overlapped with compute. Events are from a small pool.
from __future__ import annotations

import typing as T
from collections import deque

import torch


class Event:
    def __init__(self) -> None:
        self.recorded = False

    def record(self) -> None:
        self.recorded = True

    def query(self) -> bool:
        return self.recorded


class EventPool:
    def __init__(self) -> None:
        self._cache: T.List[Event] = []
        self.made = 0

    def obtain_event(self) -> Event:
        if self._cache:
            return self._cache.pop()
        self.made += 1
        return Event()

    def recycle_event(self, ev: Event) -> None:
        ev.recorded = False
        self._cache.append(ev)


class StagingArea:
    def __init__(self, n: int, shape: T.Tuple[int, ...]) -> None:
        self.q: T.Deque[torch.Tensor] = deque(torch.empty(shape) for _ in range(n))

    def obtain(self) -> torch.Tensor:
        return self.q.popleft()

    def recycle(self, t: torch.Tensor) -> None:
        self.q.append(t)


class LayerLoad(T.NamedTuple):
    layer: int
    staged: torch.Tensor
    event: Event


class LayerLoader:
    def __init__(self, area: StagingArea, events: EventPool, source: T.Dict[int, torch.Tensor]) -> None:
        self.area = area
        self.events = events
        self.source = source
        self.queue: T.Deque[LayerLoad] = deque()
        self.fences: T.Dict[int, Event] = {}

    def issue(self, layer: int) -> bool:
        src = self.source.get(layer)
        if src is None:
            return False
        staged = self.area.obtain()  # clean: travels in the queue until wait or cancel
        staged.copy_(src)
        ev = self.events.obtain_event()  # clean: travels in the queue until wait or cancel
        ev.record()
        self.queue.append(LayerLoad(layer, staged, ev))
        return True

    def issue_eager(self, layer: int) -> bool:
        ev = self.events.obtain_event()  # leak: a layer without a source returns with the event
        src = self.source.get(layer)
        if src is None:
            return False
        staged = self.area.obtain()  # clean: travels in the queue until wait or cancel
        staged.copy_(src)
        ev.record()
        self.queue.append(LayerLoad(layer, staged, ev))
        return True

    def wait(self, dst: torch.Tensor) -> int:
        if not self.queue:
            return -1
        load = self.queue.popleft()
        while not load.event.query():
            load.event.record()
        dst.copy_(load.staged)
        self.events.recycle_event(load.event)
        self.area.recycle(load.staged)
        return load.layer

    def cancel(self) -> None:
        for load in self.queue:
            self.events.recycle_event(load.event)
            self.area.recycle(load.staged)
        self.queue.clear()

    def fence(self, layer: int) -> None:
        if layer in self.fences:
            self.events.recycle_event(self.fences.pop(layer))
        ev = self.events.obtain_event()  # clean: near miss, the one before was recycled, unfence takes this one
        ev.record()
        self.fences[layer] = ev

    def unfence(self) -> None:
        for ev in self.fences.values():
            self.events.recycle_event(ev)
        self.fences = {}

    def stage(self, layer: int) -> T.Optional[torch.Tensor]:
        if layer not in self.source:
            return None
        t = self.area.obtain()  # clean: handed to the caller
        t.copy_(self.source[layer])
        return t

    def stage_scaled(self, layer: int, s: float) -> T.Optional[torch.Tensor]:
        t = self.stage(layer)  # leak: the product is a new tensor, which the caller gets in its place
        if t is None:
            return None
        return t * s

    def stage_scaled_(self, layer: int, s: float) -> T.Optional[torch.Tensor]:
        t = self.stage(layer)  # clean: near miss, mul_ gives the same tensor to the caller
        if t is None:
            return None
        return t.mul_(s)

    def norm(self, layer: int) -> float:
        t = self.stage_scaled_(layer, 0.5)  # clean: recycled after use
        if t is None:
            return 0.0
        n = float(t.norm())
        self.area.recycle(t)
        return n

    def norms(self, layers: T.Sequence[int]) -> T.List[float]:
        out = []
        for layer in layers:
            t = self.stage(layer)  # leak: a norm that is not finite goes to the next layer without a recycle
            if t is None:
                continue
            n = float(t.norm())
            if n != n:
                continue
            out.append(n)
            self.area.recycle(t)
        return out

    def flat_view(self, layer: int) -> float:
        t = self.stage(layer)  # clean: near miss, the view is reshaped back from the same storage and t is recycled
        if t is None:
            return 0.0
        flat = t.view(-1)
        flat.sub_(flat.mean())
        v = float(flat.pow(2).mean())
        self.area.recycle(t)
        return v

    def flat_cast(self, layer: int) -> float:
        t = self.stage(layer)  # leak: rebound to its double copy, and the copy is recycled
        if t is None:
            return 0.0
        t = t.to(torch.float64)
        v = float(t.var())
        self.area.recycle(t)
        return v

    def swap_pair(self, a: int, b: int) -> bool:
        ta = self.stage(a)  # leak: when b is unknown the tensor of a is lost
        tb = self.stage(b)  # leak: when a is unknown the tensor of b is lost
        if ta is None or tb is None:
            return False
        self.source[a], self.source[b] = tb.clone(), ta.clone()
        for t in (ta, tb):
            self.area.recycle(t)
        return True
