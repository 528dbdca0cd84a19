"""Parameter unsharding with reusable full-size buffers and a CUDA event pool."""
from __future__ import annotations

import logging
from typing import Callable, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist
import torch.nn as nn

logger = logging.getLogger(__name__)


class EventPool:
    def __init__(self):
        self._events: List[torch.cuda.Event] = []

    def get_event(self) -> torch.cuda.Event:
        if self._events:
            return self._events.pop()  # clean: returned
        return torch.cuda.Event()

    def return_event(self, ev: torch.cuda.Event) -> None:
        self._events.append(ev)


class FullParamPool:
    """Size classes are searched from the best fit upwards."""

    def __init__(self, sizes: List[int], device, dtype=torch.bfloat16):
        self._classes: List[Tuple[int, List[torch.Tensor]]] = []
        for n in sorted(set(sizes)):
            self._classes.append((n, [torch.empty(n, device=device, dtype=dtype) for _ in range(sizes.count(n))]))

    def alloc(self, numel: int) -> Optional[torch.Tensor]:
        for size, free in self._classes:
            if size >= numel and free:
                return free.pop()  # clean: returned
        return None

    def dealloc(self, t: torch.Tensor) -> None:
        for size, free in self._classes:
            if size == t.numel():
                free.append(t)
                return
        raise ValueError("buffer is not from this pool")


class FlatHandle:
    """The flat parameter of one wrapped module."""

    def __init__(self, module: nn.Module, shard: torch.Tensor, pool: FullParamPool, events: EventPool, group=None):
        self.module = module
        self.shard = shard
        self.pool = pool
        self.events = events
        self.group = group
        self.full: Optional[torch.Tensor] = None
        self.ready: Optional[torch.cuda.Event] = None
        self.numel = shard.numel() * dist.get_world_size(group)

    def _gather_into(self, out: torch.Tensor) -> None:
        dist.all_gather_into_tensor(out[: self.numel], self.shard, group=self.group)

    def unshard(self) -> bool:
        if self.full is not None:
            return True
        full = self.pool.alloc(self.numel)  # clean: near miss, only None leaves early, kept in self.full for reshard()
        if full is None:
            return False
        self._gather_into(full)
        self.ready = self.events.get_event()  # clean: near miss, an unsharded handle returned at the top, reshard() gives it back
        self.ready.record()
        self.full = full
        return True

    def wait_ready(self) -> torch.Tensor:
        self.ready.synchronize()
        return self.full[: self.numel]

    def reshard(self) -> None:
        if self.full is None:
            return
        self.pool.dealloc(self.full)
        self.events.return_event(self.ready)
        self.full = self.ready = None

    def refresh(self) -> bool:
        """Gather again after the optimizer step changed the shard."""
        full = self.pool.alloc(self.numel)  # leak: self.full may hold a buffer already, which is overwritten
        if full is None:
            return False
        self._gather_into(full)
        self.full = full
        if self.ready is None:
            self.ready = self.events.get_event()  # clean: near miss, only when none is held, reshard() gives it back
        self.ready.record()
        return True

    def compare_with(self, reference: torch.Tensor) -> Optional[float]:
        full = self.pool.alloc(self.numel)  # leak: the size mismatch returns None with the buffer allocated
        if full is None:
            return None
        if reference.numel() != self.numel:
            logger.warning("reference has %d elements, expected %d", reference.numel(), self.numel)
            return None
        self._gather_into(full)
        err = (full[: self.numel] - reference).abs().max().item()
        self.pool.dealloc(full)
        return err


class Runtime:
    def __init__(self, handles: List[FlatHandle], depth: int = 2):
        self.handles = handles
        self.depth = depth
        self.events = handles[0].events
        self._fences: List[torch.cuda.Event] = []
        self._marks: Dict[str, torch.cuda.Event] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, h in enumerate(self.handles):
            for ahead in self.handles[i : i + self.depth]:
                ahead.unshard()  # clean: near miss, every handle of the window is resharded when its turn is over
            if h.full is None:
                raise RuntimeError("unshard pool too small for one layer")
            h.wait_ready()
            x = h.module(x)
            h.reshard()
            self._throttle()
        return x

    def _throttle(self) -> None:
        ev = self.events.get_event()  # clean: near miss, queued in _fences, the oldest goes back when there are too many
        ev.record()
        self._fences.append(ev)
        if len(self._fences) > self.depth:
            old = self._fences.pop(0)
            old.synchronize()
            self.events.return_event(old)

    def finish(self) -> None:
        for ev in self._fences:
            ev.synchronize()
            self.events.return_event(ev)
        self._fences = []
        for ev in self._marks.values():
            self.events.return_event(ev)
        self._marks.clear()

    def mark(self, label: str) -> None:
        ev = self.events.get_event()  # leak: marking the same label in each step overwrites the previous event
        ev.record()
        self._marks[label] = ev

    def marked_done(self, label: str) -> bool:
        return label in self._marks and self._marks[label].query()


def timed(events: EventPool, fn: Callable[[], torch.Tensor], verbose: bool) -> torch.Tensor:
    start = events.get_event()  # clean: returned below on both branches
    stop = events.get_event()  # leak: given back only when verbose
    start.record()
    out = fn()
    stop.record()
    if verbose:
        stop.synchronize()
        logger.info("%.3f ms", start.elapsed_time(stop))
        events.return_event(stop)
    events.return_event(start)
    return out


def summon_all(handles: List[FlatHandle]) -> Dict[int, torch.Tensor]:
    """Host copies of all full parameters, for export."""
    out: Dict[int, torch.Tensor] = {}
    for i, h in enumerate(handles):
        buf = h.pool.alloc(h.numel)  # leak: each layer's buffer is copied to the host and then forgotten
        if buf is None:
            out[i] = h.shard.cpu()
            continue
        h._gather_into(buf)
        out[i] = buf[: h.numel].cpu()
    return out
