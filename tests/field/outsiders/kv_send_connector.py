"""Producer side of prefill/decode disaggregation: stages KV layers in pinned memory and sends them."""
from __future__ import annotations

import logging
import queue
import threading
import time
from dataclasses import dataclass
from typing import Callable, Optional

import torch

log = logging.getLogger("kv.send")


class StagingFull(RuntimeError):
    pass


class StagingArena:
    def __init__(self, slots: int, slot_bytes: int) -> None:
        self._buf = torch.empty((slots, slot_bytes), dtype=torch.uint8)
        self._avail = list(range(slots))
        self._cv = threading.Condition()

    def checkout(self, timeout: float = 1.0) -> int:
        with self._cv:
            if not self._cv.wait_for(lambda: bool(self._avail), timeout):
                raise StagingFull("no staging slot")
            return self._avail.pop()

    def try_checkout(self) -> Optional[int]:
        with self._cv:
            return self._avail.pop() if self._avail else None

    def checkin(self, slot: int) -> None:
        with self._cv:
            self._avail.append(slot)
            self._cv.notify()

    def view(self, slot: int) -> torch.Tensor:
        return self._buf[slot]


@dataclass
class SendJob:
    request_id: str
    layer: int
    slot: int
    nbytes: int


class KVSender:
    def __init__(self, arena: StagingArena, transport: Callable[[str, int, torch.Tensor], bool]) -> None:
        self.arena = arena
        self.transport = transport
        self.jobs: "queue.Queue[Optional[SendJob]]" = queue.Queue()
        self.worker = threading.Thread(target=self._loop, daemon=True)
        self.cancelled: set[str] = set()

    def start(self) -> None:
        self.worker.start()

    def save_layer(self, request_id: str, layer: int, kv: torch.Tensor) -> None:
        flat = kv.contiguous().view(torch.uint8).flatten()
        slot = self.arena.checkout()  # clean: the job carries it to the worker, which checks it in
        self.arena.view(slot)[: flat.numel()].copy_(flat)
        self.jobs.put(SendJob(request_id, layer, slot, flat.numel()))

    def save_layer_nowait(self, request_id: str, layer: int, kv: torch.Tensor) -> bool:
        flat = kv.contiguous().view(torch.uint8).flatten()
        slot = self.arena.try_checkout()  # leak: a layer that is too large returns with the slot in hand
        if slot is None:
            return False
        view = self.arena.view(slot)
        if flat.numel() > view.numel():
            log.error("layer %d of %s does not fit the slot", layer, request_id)
            return False
        view[: flat.numel()].copy_(flat)
        self.jobs.put(SendJob(request_id, layer, slot, flat.numel()))
        return True

    def send_now(self, request_id: str, layer: int, kv: torch.Tensor) -> bool:
        flat = kv.contiguous().view(torch.uint8).flatten()
        slot = self.arena.checkout(timeout=0.2)  # clean: finally covers both returns
        try:
            view = self.arena.view(slot)[: flat.numel()]
            view.copy_(flat)
            if request_id in self.cancelled:
                return False
            return self.transport(request_id, layer, view)
        finally:
            self.arena.checkin(slot)

    def send_with_retry(self, request_id: str, layer: int, kv: torch.Tensor, attempts: int = 3) -> bool:
        flat = kv.contiguous().view(torch.uint8).flatten()
        for attempt in range(attempts):
            slot = self.arena.checkout()  # leak: each failed attempt takes another slot and keeps the old one
            view = self.arena.view(slot)[: flat.numel()]
            view.copy_(flat)
            if self.transport(request_id, layer, view):
                self.arena.checkin(slot)
                return True
            time.sleep(0.01 * (attempt + 1))
        return False

    def send_with_backoff(self, request_id: str, layer: int, kv: torch.Tensor, attempts: int = 3) -> bool:
        flat = kv.contiguous().view(torch.uint8).flatten()
        slot = self.arena.checkout()  # clean: near miss, taken once before the loop and checked in after either exit
        view = self.arena.view(slot)[: flat.numel()]
        view.copy_(flat)
        sent = False
        for attempt in range(attempts):
            sent = self.transport(request_id, layer, view)
            if sent:
                break
            time.sleep(0.01 * (attempt + 1))
        self.arena.checkin(slot)
        return sent

    def send_pair(self, request_id: str, key: torch.Tensor, value: torch.Tensor) -> bool:
        k_slot = self.arena.checkout()  # leak: the second checkout's StagingFull is handled without this one
        try:
            v_slot = self.arena.checkout()  # clean: checked in with its partner
        except StagingFull:
            log.warning("no slot for the values of %s", request_id)
            return False
        for slot, t in ((k_slot, key), (v_slot, value)):
            flat = t.contiguous().view(torch.uint8).flatten()
            self.arena.view(slot)[: flat.numel()].copy_(flat)
        ok = self.transport(request_id, 0, self.arena.view(k_slot)) and self.transport(
            request_id, 1, self.arena.view(v_slot))
        self.arena.checkin(k_slot)
        self.arena.checkin(v_slot)
        return ok

    def _loop(self) -> None:
        while True:
            job = self.jobs.get()
            if job is None:
                return
            try:
                if job.request_id not in self.cancelled:
                    self.transport(job.request_id, job.layer, self.arena.view(job.slot)[: job.nbytes])
            except OSError:
                log.exception("send of %s failed", job.request_id)
            finally:
                self.arena.checkin(job.slot)

    def stop(self) -> None:
        self.jobs.put(None)
        self.worker.join()
