"""Disaggregated prefill: staging of KV pages through registered memory."""
import logging
import queue
import threading
from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

import torch

log = logging.getLogger("kv.transfer")


class RegistrationError(RuntimeError):
    pass


class MemoryRegistry:
    """Keeps track of the regions known to the NIC."""

    def __init__(self, limit: int = 256):
        self._regions: Dict[int, Tuple[int, int]] = {}
        self._next_key = 1
        self._limit = limit

    def register(self, addr: int, length: int) -> int:
        if len(self._regions) >= self._limit:
            raise RegistrationError("out of memory keys")
        key = self._next_key
        self._next_key += 1
        self._regions[key] = (addr, length)
        return key

    def deregister(self, key: int) -> None:
        self._regions.pop(key)


class StagingRing:
    def __init__(self, slots: int, slot_bytes: int):
        self._bufs = [torch.empty(slot_bytes, dtype=torch.uint8) for _ in range(slots)]
        self._idle: "queue.Queue[int]" = queue.Queue()
        for i in range(slots):
            self._idle.put(i)

    def rent_slot(self) -> int:
        return self._idle.get()  # clean: handed to the caller

    def return_slot(self, slot: int) -> None:
        self._idle.put(slot)

    def view(self, slot: int) -> torch.Tensor:
        return self._bufs[slot]


@dataclass
class Transfer:
    req_id: str
    slot: int
    mkey: int
    nbytes: int


class TransferEngine:
    def __init__(self, registry: MemoryRegistry, ring: StagingRing, peer=None):
        self.registry = registry
        self.ring = ring
        self.peer = peer
        self.inflight: Dict[str, Transfer] = {}
        self._cache: Dict[int, int] = {}

    def start(self, req_id: str, payload: torch.Tensor) -> Optional[Transfer]:
        slot = self.ring.rent_slot()  # leak: a failed registration returns without giving the slot back
        buf = self.ring.view(slot)
        buf[: payload.numel()].copy_(payload)
        try:
            mkey = self.registry.register(buf.data_ptr(), payload.numel())  # clean: goes into the transfer, which complete() takes apart
        except RegistrationError:
            log.error("cannot register for %s", req_id)
            return None
        t = Transfer(req_id, slot, mkey, payload.numel())
        self.inflight[req_id] = t
        return t

    def begin(self, req_id: str, payload: torch.Tensor) -> Optional[Transfer]:
        slot = self.ring.rent_slot()  # clean: near miss, the handler returns the slot
        buf = self.ring.view(slot)
        try:
            mkey = self.registry.register(buf.data_ptr(), payload.numel())  # clean: goes into the transfer
        except RegistrationError:
            self.ring.return_slot(slot)
            return None
        buf[: payload.numel()].copy_(payload)
        t = Transfer(req_id, slot, mkey, payload.numel())
        self.inflight[req_id] = t
        return t

    def complete(self, req_id: str) -> None:
        t = self.inflight.pop(req_id, None)
        if t is None:
            return
        self.registry.deregister(t.mkey)
        self.ring.return_slot(t.slot)

    def write_through(self, payload: torch.Tensor) -> int:
        slot = self.ring.rent_slot()  # clean: the finally gives it back
        mkey = self.registry.register(self.ring.view(slot).data_ptr(), payload.numel())  # leak: only deregistered when there is a peer
        try:
            self.ring.view(slot)[: payload.numel()].copy_(payload)
            if self.peer is None:
                return 0
            n = self.peer.send(mkey, payload.numel())
            self.registry.deregister(mkey)
            return n
        finally:
            self.ring.return_slot(slot)

    def key_for(self, tensor: torch.Tensor) -> int:
        ptr = tensor.data_ptr()
        key = self._cache.get(ptr)
        if key is None:
            key = self.registry.register(ptr, tensor.nbytes)  # clean: cached, drop_keys() deregisters all
            self._cache[ptr] = key
        return key

    def drop_keys(self) -> None:
        while self._cache:
            _, key = self._cache.popitem()
            self.registry.deregister(key)

    def rekey(self, req_id: str, tensor: torch.Tensor) -> None:
        t = self.inflight[req_id]
        self.registry.deregister(t.mkey)
        t.mkey = self.registry.register(tensor.data_ptr(), tensor.nbytes)  # clean: near miss, the old key is deregistered before the overwrite
        t.nbytes = tensor.nbytes

    def push_many(self, payloads: List[torch.Tensor]) -> int:
        sent = 0
        for p in payloads:
            slot = self.ring.rent_slot()  # leak: the oversized payload continues past the return
            view = self.ring.view(slot)
            if p.numel() > view.numel():
                log.warning("payload of %d bytes does not fit", p.numel())
                continue
            view[: p.numel()].copy_(p)
            self.peer.send_slot(slot)
            self.ring.return_slot(slot)
            sent += 1
        return sent

    def push_batch(self, payloads: List[torch.Tensor]) -> int:
        slots: List[int] = []
        for p in payloads:
            slot = self.ring.rent_slot()  # clean: near miss, all collected slots are returned after the send
            slots.append(slot)
            self.ring.view(slot)[: p.numel()].copy_(p)
        self.peer.send_slots(slots)
        for slot in slots:
            self.ring.return_slot(slot)
        return len(slots)


class Receiver(threading.Thread):
    def __init__(self, registry: MemoryRegistry, arena: torch.Tensor):
        super().__init__(daemon=True)
        self._registry = registry
        self._mkey = registry.register(arena.data_ptr(), arena.nbytes)  # clean: near miss, shutdown() deregisters whatever the state
        self._stop_evt = threading.Event()

    def run(self) -> None:
        while not self._stop_evt.wait(0.1):
            pass

    def shutdown(self) -> None:
        self._stop_evt.set()
        if self.is_alive():
            self.join()
        self._registry.deregister(self._mkey)
