"""Expert weights of a mixture-of-experts model that does not fit on the device.

The experts live in pinned host memory. A limited number of device slots holds those
that are hot, a router hook asks for the next layer's experts ahead of time.
"""
import logging
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Dict, Iterable, List, Optional, Tuple

import torch
import torch.nn.functional as F

log = logging.getLogger("moe.offload")

Key = Tuple[int, int]  # layer, expert


class OutOfSlots(RuntimeError): ...


class HostCopyError(RuntimeError): ...


@dataclass(eq=False)
class DeviceSlot:
    index: int
    gate_up: torch.Tensor
    down: torch.Tensor


class SlotArena:
    def __init__(self, count: int, hidden: int, inner: int, device: str = "cuda"):
        self._lock = threading.Lock()
        self._free: List[DeviceSlot] = []
        for i in range(count):
            gate_up = torch.empty(2 * inner, hidden, dtype=torch.bfloat16, device=device)
            down = torch.empty(hidden, inner, dtype=torch.bfloat16, device=device)
            self._free.append(DeviceSlot(i, gate_up, down))

    def alloc(self) -> Optional[DeviceSlot]:
        with self._lock:
            return self._free.pop() if self._free else None  # clean: handed to the caller

    def free(self, slot: DeviceSlot) -> None:
        with self._lock:
            self._free.append(slot)


class CopyStreams:
    def __init__(self, count: int):
        self._streams = [torch.cuda.Stream() for _ in range(count)]
        self._available = threading.Semaphore(count)

    def borrow(self, timeout: float) -> Optional[torch.cuda.Stream]:
        if not self._available.acquire(timeout=timeout):  # clean: the permit goes along with the stream
            return None
        return self._streams.pop()  # clean: handed to the caller

    def hand_back(self, stream: torch.cuda.Stream) -> None:
        self._streams.append(stream)
        self._available.release()


@dataclass(eq=False)
class Cached:
    key: Key
    slot: DeviceSlot
    refs: int = 0
    ready: Optional[torch.cuda.Event] = None


class ExpertRef:
    def __init__(self, cache: "ExpertCache", item: Cached):
        self._cache, self._item = cache, item
        self.slot = item.slot

    def __enter__(self) -> DeviceSlot:
        return self.slot

    def __exit__(self, *exc) -> None:
        self.drop()

    def drop(self) -> None:
        item, self._item = self._item, None
        if item is not None:
            self._cache._unref(item)


class ExpertCache:
    def __init__(self, host: Dict[Key, Tuple[torch.Tensor, torch.Tensor]], arena: SlotArena, streams: CopyStreams):
        self.host, self.arena, self.streams = host, arena, streams
        self._items: "OrderedDict[Key, Cached]" = OrderedDict()
        self._lock = threading.RLock()
        self._prefetcher = ThreadPoolExecutor(1, thread_name_prefix="experts")
        self._wanted: Dict[Key, "Future[ExpertRef]"] = {}

    def _evict_one(self) -> bool:
        for key, item in self._items.items():
            if item.refs == 0:
                del self._items[key]
                self.arena.free(item.slot)
                return True
        return False

    def _slot(self) -> DeviceSlot:
        while True:
            slot = self.arena.alloc()  # clean: returned
            if slot is not None:
                return slot
            if not self._evict_one():
                raise OutOfSlots("every cached expert is in use")

    def _weights_for(self, key: Key, slot: DeviceSlot) -> Tuple[torch.Tensor, torch.Tensor]:
        gate_up, down = self.host[key]
        if gate_up.shape != slot.gate_up.shape or down.shape != slot.down.shape:
            raise HostCopyError(f"{key} has shape {tuple(gate_up.shape)}")
        return gate_up, down

    def _fill(self, key: Key, slot: DeviceSlot) -> torch.cuda.Event:
        stream = self.streams.borrow(timeout=2.0)  # leak: _weights_for() raises on another shape before the stream is handed back
        if stream is None:
            raise HostCopyError(f"no copy stream for {key}")
        gate_up, down = self._weights_for(key, slot)
        ready = torch.cuda.Event()
        with torch.cuda.stream(stream):
            slot.gate_up.copy_(gate_up, non_blocking=True)
            slot.down.copy_(down, non_blocking=True)
            ready.record(stream)
        self.streams.hand_back(stream)
        return ready

    def get(self, key: Key) -> ExpertRef:
        with self._lock:
            item = self._items.get(key)
            if item is None:
                slot = self._slot()  # clean: near miss, freed when the copy fails, otherwise owned by the cached item until it is evicted
                try:
                    ready = self._fill(key, slot)
                except HostCopyError:
                    self.arena.free(slot)
                    raise
                item = Cached(key, slot, ready=ready)
                self._items[key] = item
            else:
                self._items.move_to_end(key)
            item.refs += 1
        torch.cuda.current_stream().wait_event(item.ready)
        return ExpertRef(self, item)  # clean: the reference that was counted is the caller's

    def _unref(self, item: Cached) -> None:
        with self._lock:
            item.refs -= 1

    def pin_shared(self, layers: Iterable[int]) -> "SharedExperts":
        refs = {}
        for layer in layers:
            refs[layer] = self.get((layer, 0))  # leak: OutOfSlots for a later layer loses the references of the layers before it
        return SharedExperts(refs)

    def prefetch(self, key: Key) -> None:
        if key not in self._wanted:
            self._wanted[key] = self._prefetcher.submit(self.get, key)  # leak: collect() forgets the future at a timeout, and the reference that it has later is held by nobody

    def collect(self, key: Key) -> Optional[ExpertRef]:
        future = self._wanted.pop(key, None)
        if future is None:
            return None
        try:
            return future.result(timeout=1.0)
        except (OutOfSlots, HostCopyError, TimeoutError) as exc:
            log.debug("prefetch of %s: %s", key, exc)
            return None

    def cancel_prefetch(self) -> None:
        for future in self._wanted.values():
            if not future.cancel():
                future.add_done_callback(lambda f: f.exception() is None and f.result().drop())
        self._wanted.clear()

    def replace(self, key: Key, gate_up: torch.Tensor, down: torch.Tensor) -> bool:
        with self._lock:
            self.host[key] = (gate_up, down)
            slot = self._slot()  # leak: while the older copy is in use this returns False and keeps the slot
            old = self._items.get(key)
            if old is not None and old.refs:
                log.info("%s is in use, it keeps its old weights", key)
                return False
            try:
                ready = self._fill(key, slot)
            except HostCopyError:
                self.arena.free(slot)
                return False
            self._items[key] = Cached(key, slot, ready=ready)
            if old is not None:
                self.arena.free(old.slot)
            return True

    def shutdown(self) -> None:
        self.cancel_prefetch()
        self._prefetcher.shutdown(wait=True)
        with self._lock:
            while self._evict_one(): ...


class SharedExperts:
    def __init__(self, refs: Dict[int, ExpertRef]):
        self.refs = refs

    def close(self) -> None:
        for ref in self.refs.values():
            ref.drop()


class OffloadedMoE(torch.nn.Module):
    def __init__(self, layer: int, router: torch.nn.Module, cache: ExpertCache, shared: Optional[SharedExperts], top_k: int = 2):
        super().__init__()
        self.layer, self.router, self.cache, self.shared, self.top_k = layer, router, cache, shared, top_k

    @staticmethod
    def _mlp(x: torch.Tensor, slot: DeviceSlot) -> torch.Tensor:
        gate, up = (x @ slot.gate_up.T).chunk(2, dim=-1)
        return (F.silu(gate) * up) @ slot.down.T

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = torch.topk(self.router(x).softmax(-1), self.top_k, dim=-1)
        out = self._mlp(x, self.shared.refs[self.layer].slot) if self.shared else torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            ref = self.cache.collect((self.layer, expert))  # clean: near miss, used as a context manager below, and None is replaced by a fresh one
            if ref is None:
                ref = self.cache.get((self.layer, expert))  # clean: the with below drops it
            with ref as slot:
                rows, rank = (chosen == expert).nonzero(as_tuple=True)
                out[rows] += weights[rows, rank, None] * self._mlp(x[rows], slot)
        return out

    def forward_single(self, x: torch.Tensor) -> Optional[torch.Tensor]:
        weights, chosen = torch.topk(self.router(x).softmax(-1), self.top_k, dim=-1)
        refs: List[ExpertRef] = []
        try:
            for expert in chosen[0].tolist():
                refs.append(self.cache.get((self.layer, expert)))  # leak: OutOfSlots is turned into None without dropping those in refs
        except OutOfSlots:
            return None
        out = sum(w * self._mlp(x, r.slot) for w, r in zip(weights[0], refs))
        for ref in refs:
            ref.drop()
        return out

    def calibrate(self, batches: List[torch.Tensor], expert: int) -> float:
        with ExitStack() as stack:
            slot = stack.enter_context(self.cache.get((self.layer, expert)))  # clean: the exit stack drops it
            return max(float(self._mlp(b, slot).abs().max()) for b in batches)

    def hint(self, next_layer: int, hidden: torch.Tensor, next_router: torch.nn.Module) -> None:
        for expert in next_router(hidden).topk(self.top_k, dim=-1).indices.unique().tolist():
            self.cache.prefetch((next_layer, expert))
