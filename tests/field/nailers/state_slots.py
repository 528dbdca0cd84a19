"""Recurrent-state slots of hybrid (Mamba and attention) models, with snapshots for prefix reuse."""
from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, Hashable, Optional, TypeVar

import torch

K = TypeVar("K", bound=Hashable)
log = logging.getLogger(__name__)


class IndexPool:
    """LIFO pool of indices."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._stack = list(range(size - 1, -1, -1))

    def rent(self) -> Optional[int]:
        if not self._stack:
            return None
        return self._stack.pop()

    def unrent(self, index: int) -> None:
        self._stack.append(index)

    def __len__(self) -> int:
        return len(self._stack)


class SubPool(IndexPool):
    """Grows by renting from a parent and shrinks by unrenting to it."""

    def __init__(self, parent: IndexPool) -> None:
        super().__init__(0)
        self.parent = parent

    def rent(self) -> Optional[int]:
        if not self._stack:
            extra = self.parent.rent()  # clean: near miss, stays in this pool until give_up() or close()
            if extra is None:
                return None
            self._stack.append(extra)
            self.size += 1
        return self._stack.pop()

    def give_up(self, count: int) -> int:
        done = 0
        while self._stack and done < count:
            self.parent.unrent(self._stack.pop())
            self.size -= 1
            done += 1
        return done

    def close(self) -> None:
        self.give_up(len(self._stack))


class BurstPool(SubPool):
    """Rents several at a time from the parent."""

    def __init__(self, parent: IndexPool, burst: int) -> None:
        super().__init__(parent)
        self.burst = burst

    def rent(self) -> Optional[int]:
        if self._stack:
            return self._stack.pop()
        first: Optional[int] = None
        for _ in range(self.burst):
            extra = self.parent.rent()  # leak: only the first of a burst is kept, the others are not stacked
            if extra is None:
                break
            self.size += 1
            if first is None:
                first = extra
        return first


class PinnedLRU(Generic[K]):
    """Snapshot index per key. A pinned snapshot is not evicted."""

    def __init__(self, pool: IndexPool) -> None:
        self.pool = pool
        self._map: "OrderedDict[K, int]" = OrderedDict()
        self._pins: dict[int, int] = {}

    def hold(self, key: K) -> Optional[int]:
        index = self._map.get(key)
        if index is not None:
            self._pins[index] = self._pins.get(index, 0) + 1
        return index

    def unhold(self, index: int) -> None:
        self._pins[index] -= 1

    def store(self, key: K) -> Optional[int]:
        """Index to write the snapshot of `key` to."""
        if key in self._map:
            return self._map[key]
        index = self.pool.rent()  # clean: near miss, in _map until evict() unrents it
        if index is None:
            if not self.evict():
                return None
            index = self.pool.rent()  # clean: in _map until evict() unrents it
        if index is not None:
            self._map[key] = index
        return index

    def evict(self) -> bool:
        for key, index in self._map.items():
            if not self._pins.get(index):
                del self._map[key]
                self.pool.unrent(index)
                return True
        return False

    def invalidate(self, key: K) -> bool:
        index = self._map.pop(key, None)
        if index is None:
            return False
        self.pool.unrent(index)
        return True


@dataclass
class HybridRequest:
    rid: str
    prefix: tuple[int, ...]
    state: Optional[int] = None
    draft_state: Optional[int] = None
    snapshot: Optional[int] = None


class StateManager:
    def __init__(self, pool: IndexPool, snapshots: PinnedLRU[tuple[int, ...]], width: int) -> None:
        self.pool = pool
        self.snapshots = snapshots
        self.states = torch.zeros(pool.size, width)
        self.requests: dict[str, HybridRequest] = {}

    def start(self, req: HybridRequest) -> bool:
        state = self.pool.rent()  # clean: in the request, stop() unrents it
        if state is None:
            return False
        held = self.snapshots.hold(req.prefix)  # clean: near miss, unheld as soon as the state is copied
        if held is not None:
            self.states[state].copy_(self.states[held])
            self.snapshots.unhold(held)
        req.state = state
        self.requests[req.rid] = req
        return True

    def start_speculative(self, req: HybridRequest) -> bool:
        if not self.start(req):
            return False
        req.draft_state = self.pool.rent()  # leak: stop() unrents `state` only
        if req.draft_state is None:
            log.info("no draft state for %s", req.rid)
        return True

    def start_cached(self, req: HybridRequest) -> bool:
        held = self.snapshots.hold(req.prefix)  # leak: stays pinned when there is no state slot
        if held is None:
            return self.start(req)
        state = self.pool.rent()  # clean: in the request, stop() unrents it
        if state is None:
            return False
        req.state, req.snapshot = state, held
        self.requests[req.rid] = req
        return True

    def stop(self, rid: str) -> None:
        req = self.requests.pop(rid)
        if req.snapshot is not None:
            self.snapshots.unhold(req.snapshot)
            req.snapshot = None
        if req.state is not None:
            self.pool.unrent(req.state)
            req.state = None

    def checkpoint(self, req: HybridRequest, prefix: tuple[int, ...]) -> bool:
        target = self.snapshots.store(prefix)  # clean: near miss, the LRU owns it
        if target is None or req.state is None:
            return False
        self.states[target].copy_(self.states[req.state])
        return True

    def longest_snapshot(self, prefix: tuple[int, ...], stride: int) -> Optional[int]:
        """Held snapshot of the longest stored prefix."""
        for end in range(len(prefix) - len(prefix) % stride, 0, -stride):
            held = self.snapshots.hold(prefix[:end])  # clean: handed to the caller
            if held is not None:
                return held
        return None

    def reuse_ratio(self, prompts: list[tuple[int, ...]], stride: int) -> float:
        found = 0
        for prompt in prompts:
            if self.longest_snapshot(prompt, stride) is not None:  # leak: counted, never unheld
                found += 1
        return found / max(len(prompts), 1)

    def fork_state(self, src: HybridRequest, dst: HybridRequest) -> bool:
        if src.state is None:
            return False
        copy = self.pool.rent()  # leak: a request that has a state already returns False with the copy
        if copy is None:
            return False
        if dst.state is not None:
            log.warning("%s has a state", dst.rid)
            return False
        self.states[copy].copy_(self.states[src.state])
        dst.state = copy
        self.requests[dst.rid] = dst
        return True
