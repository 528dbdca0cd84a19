"""Point-to-point KV cache transfer between prefill and decode workers."""
from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Callable, Optional


class TransferFailed(Exception):
    pass


@dataclass(frozen=True)
class MemRegion:
    addr: int
    length: int
    rkey: int


@dataclass
class XferHandle:
    ident: int
    regions: list[MemRegion]
    state: str = "INIT"


@dataclass
class KVReceiver:
    room: int
    handle: Optional[XferHandle] = None
    regions: list[MemRegion] = field(default_factory=list)


class TransferAgent:
    def __init__(self, backend: Any, max_regions: int) -> None:
        self.backend = backend
        self.max_regions = max_regions
        self.regions: dict[int, MemRegion] = {}
        self.handles: dict[int, XferHandle] = {}
        self._next = 0

    def register_memory(self, addr: int, length: int) -> Optional[MemRegion]:
        if len(self.regions) >= self.max_regions:
            return None
        region = MemRegion(addr, length, self.backend.pin(addr, length))
        self.regions[region.rkey] = region
        return region

    def deregister_memory(self, region: MemRegion) -> None:
        del self.regions[region.rkey]
        self.backend.unpin(region.rkey)

    def make_xfer(self, regions: list[MemRegion]) -> XferHandle:
        self._next += 1
        handle = XferHandle(self._next, regions)
        self.handles[handle.ident] = handle
        return handle

    def release_xfer(self, handle: XferHandle) -> None:
        handle.state = "RELEASED"
        del self.handles[handle.ident]

    def poll(self, handle: XferHandle) -> str:
        handle.state = self.backend.status(handle.ident)
        return handle.state


class KVTransferManager:
    def __init__(self, agent: TransferAgent, timeout: float) -> None:
        self.agent = agent
        self.timeout = timeout
        self.receivers: dict[int, KVReceiver] = {}
        self.sending: list[tuple[XferHandle, Callable[[], None]]] = []
        self.cache_regions: list[MemRegion] = []
        self.aux_regions: list[MemRegion] = []

    def register_cache(self, layers: list[tuple[int, int]], aux: list[tuple[int, int]]) -> None:
        for addr, length in layers:
            region = self.agent.register_memory(addr, length)  # clean: near miss, cache_regions owns it until shutdown
            if region is not None:
                self.cache_regions.append(region)
        for addr, length in aux:
            region = self.agent.register_memory(addr, length)  # leak: shutdown clears aux_regions without deregistering
            if region is not None:
                self.aux_regions.append(region)

    def wait(self, handle: XferHandle) -> bool:
        deadline = time.monotonic() + self.timeout
        while self.agent.poll(handle) == "PROC":
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return handle.state == "DONE"

    def send_blocking(self, regions: list[MemRegion]) -> bool:
        handle = self.agent.make_xfer(regions)  # leak: not released where the wait times out
        if not self.wait(handle):
            return False
        self.agent.release_xfer(handle)
        return True

    def send_or_fail(self, regions: list[MemRegion]) -> bool:
        handle = self.agent.make_xfer(regions)  # clean: near miss, released before the result is looked at
        ok = self.wait(handle)
        self.agent.release_xfer(handle)
        if not ok:
            return False
        return True

    def send_async(self, regions: list[MemRegion], on_done: Callable[[], None]) -> None:
        handle = self.agent.make_xfer(regions)  # clean: near miss, reap releases it in every final state, shutdown the rest
        self.sending.append((handle, on_done))

    def reap(self) -> int:
        still: list[tuple[XferHandle, Callable[[], None]]] = []
        finished = 0
        for handle, on_done in self.sending:
            state = self.agent.poll(handle)
            if state == "PROC":
                still.append((handle, on_done))
                continue
            self.agent.release_xfer(handle)
            if state == "DONE":
                on_done()
            finished += 1
        self.sending = still
        return finished

    def send_adhoc(self, addr: int, length: int) -> bool:
        region = self.agent.register_memory(addr, length)  # leak: TransferFailed is answered with False, only the handle is released
        if region is None:
            return False
        handle = self.agent.make_xfer([region])  # clean: near miss, released in the handler and after the wait
        try:
            self.agent.backend.post(handle.ident)
        except TransferFailed:
            self.agent.release_xfer(handle)
            return False
        self.wait(handle)
        self.agent.release_xfer(handle)
        self.agent.deregister_memory(region)
        return True

    def prepare_receive(self, room: int, spans: list[tuple[int, int]]) -> bool:
        if room in self.receivers:
            return False
        receiver = KVReceiver(room)
        for addr, length in spans:
            region = self.agent.register_memory(addr, length)  # clean: near miss, _close_receiver deregisters the partial list
            if region is None:
                self._close_receiver(receiver)
                return False
            receiver.regions.append(region)
        receiver.handle = self.agent.make_xfer(receiver.regions)  # clean: held by the receiver until complete or shutdown
        self.receivers[room] = receiver
        return True

    def repost(self, room: int) -> bool:
        receiver = self.receivers.get(room)
        if receiver is None:
            return False
        receiver.handle = self.agent.make_xfer(receiver.regions)  # leak: overwrites the handle of the failed attempt unreleased
        return True

    def complete(self, room: int) -> None:
        receiver = self.receivers.pop(room, None)
        if receiver is not None:
            self._close_receiver(receiver)

    def _close_receiver(self, receiver: KVReceiver) -> None:
        if receiver.handle is not None:
            self.agent.release_xfer(receiver.handle)
            receiver.handle = None
        for region in receiver.regions:
            self.agent.deregister_memory(region)
        receiver.regions.clear()

    def bounce(self, src: tuple[int, int], dst: tuple[int, int]) -> bool:
        left = self.agent.register_memory(*src)  # clean: near miss, deregistered when the second one is refused
        if left is None:
            return False
        right = self.agent.register_memory(*dst)  # clean: deregistered after the transfer
        if right is None:
            self.agent.deregister_memory(left)
            return False
        done = self.send_or_fail([left, right])
        self.agent.deregister_memory(right)
        self.agent.deregister_memory(left)
        return done

    def shutdown(self) -> None:
        for room in list(self.receivers):
            self.complete(room)
        for handle, _ in self.sending:
            self.agent.release_xfer(handle)
        self.sending.clear()
        for region in self.cache_regions:
            self.agent.deregister_memory(region)
        self.cache_regions.clear()
        self.aux_regions.clear()
