from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Deque, Dict, List, Optional

from .loader import AdapterLoader
from .slots import AdapterSlot


@dataclass
class GenerationRequest:
    request_id: str
    adapter: Optional[str]
    tokens: int = 0
    budget: int = 4
    slot: Optional[AdapterSlot] = None


class AdapterRouter:
    def __init__(self, loader: AdapterLoader) -> None:
        self.loader = loader
        self.queue: Deque[GenerationRequest] = deque()
        self.active: Dict[str, GenerationRequest] = {}

    def admit(self, request: GenerationRequest) -> bool:
        if request.request_id in self.active:
            return False
        if request.adapter is not None:
            request.slot = self.loader.acquire(request.adapter)  # clean: near miss, base-model requests have no slot and retire() checks
            if request.slot is None:
                self.queue.append(request)
                return False
        self.active[request.request_id] = request
        return True

    def retire(self, request_id: str) -> None:
        request = self.active.pop(request_id, None)
        if request is None:
            return
        if request.slot is not None:
            self.loader.release(request.slot)
            request.slot = None

    def step(self) -> List[str]:
        done = [rid for rid, r in self.active.items() if r.tokens + 1 >= r.budget]
        for request in self.active.values():
            request.tokens += 1
        for rid in done:
            self.retire(rid)
        return done

    def switch_adapter(self, request_id: str, name: str) -> bool:
        request = self.active.get(request_id)
        if request is None:
            return False
        fresh = self.loader.acquire(name)  # clean: near miss, swapped in after the old slot was released
        if fresh is None:
            return False
        if request.slot is not None:
            self.loader.release(request.slot)
        request.adapter, request.slot = name, fresh
        return True

    def compose(self, first: str, second: str) -> Optional[bytes]:
        a = self.loader.acquire(first)  # leak: the second adapter missing returns with this one pinned
        b = self.loader.acquire(second) if a is not None else None  # clean: released with the first
        if a is None or b is None:
            return None
        merged = bytes(x ^ y for x, y in zip(a.weights, b.weights))
        self.loader.release(a)
        self.loader.release(b)
        return merged

    def peek(self, name: str, n: int) -> bytes:
        with self.loader.slots.pinning(name) as slot:  # clean: context manager
            return slot.weights[:n]
