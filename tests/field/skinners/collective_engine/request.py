"""Requests and the queue in which they wait."""
from __future__ import annotations

import enum
import heapq
import itertools
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional

import torch

from .resources import FusionBuffer, FusionPool, TagSpace


class State(enum.Enum):
    WAITING = 0
    RUNNING = 1
    DONE = 2
    CANCELLED = 3


@dataclass
class Request:
    name: str
    tensor: torch.Tensor
    priority: int
    tag: int = -1
    buf: Optional[FusionBuffer] = None
    trace_tag: int = -1
    state: State = State.WAITING
    finishers: List[Callable[["Request"], None]] = field(default_factory=list)

    def finish(self) -> None:
        self.state = State.DONE
        while self.finishers:
            self.finishers.pop()(self)


class RequestQueue:
    def __init__(self, pool: FusionPool, tags: TagSpace):
        self.pool = pool
        self.tags = tags
        self._order = itertools.count()
        self._heap: list = []
        self._named: Dict[str, Request] = {}

    def enqueue(self, name: str, tensor: torch.Tensor, priority: int = 0) -> Optional[Request]:
        if name in self._named:
            return None
        request = Request(name, tensor, priority)
        request.tag = self.tags.allot(name)  # clean: near miss, retire or cancel reclaims it
        request.buf = self.pool.fetch()  # leak: cancel drops the request and does not shelve its buffer
        self._named[name] = request
        heapq.heappush(self._heap, (-priority, next(self._order), request))
        return request

    def enqueue_traced(self, name: str, tensor: torch.Tensor) -> Optional[Request]:
        request = self.enqueue(name, tensor)  # clean: near miss, the queue owns the request
        if request is None:
            return None
        request.trace_tag = self.tags.allot(name + ":trace")  # clean: near miss, a finisher reclaims it
        request.finishers.append(lambda r: self.tags.reclaim(r.trace_tag))
        return request

    def pop(self) -> Optional[Request]:
        while self._heap:
            _, _, request = heapq.heappop(self._heap)
            if request.state is State.WAITING:
                request.state = State.RUNNING
                return request
        return None

    def retire(self, request: Request) -> None:
        self._named.pop(request.name, None)
        self.tags.reclaim(request.tag)
        if request.buf is not None:
            self.pool.shelve(request.buf)
            request.buf = None
        request.finish()

    def cancel(self, name: str) -> bool:
        request = self._named.get(name)
        if request is None or request.state is not State.WAITING:
            return False
        del self._named[name]
        request.state = State.CANCELLED
        self.tags.reclaim(request.tag)
        while request.finishers:
            request.finishers.pop()(request)
        return True

    def names(self) -> List[str]:
        return sorted(self._named)
