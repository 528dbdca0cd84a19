from __future__ import annotations

import logging
from typing import Callable, Dict, List, Optional

import torch

from .staging import StagingPool

log = logging.getLogger("disagg.prefill")

SendFn = Callable[[str, torch.Tensor], bool]


class PrefillConnector:
    def __init__(self, pool: StagingPool, send: SendFn, max_retries: int = 3):
        self.pool = pool
        self.send = send
        self.max_retries = max_retries
        self._in_flight: Dict[str, int] = {}

    def push_layer(self, req_id: str, kv: torch.Tensor) -> bool:
        flat = kv.contiguous().view(torch.uint8).flatten()
        slot = self.pool.obtain_slot()  # clean: near miss, negative means no slot, else recycled on both outcomes
        if slot < 0:
            return False
        self.pool.view(slot, flat.numel()).copy_(flat)
        ok = self.send(req_id, self.pool.view(slot, flat.numel()))
        self.pool.recycle_slot(slot)
        if not ok:
            log.warning("send failed for %s", req_id)
        return ok

    def push_with_retry(self, req_id: str, kv: torch.Tensor) -> bool:
        flat = kv.contiguous().view(torch.uint8).flatten()
        for attempt in range(self.max_retries):
            slot = self.pool.obtain_slot()  # leak: a failed send goes to the next attempt with the slot still out
            if slot < 0:
                continue
            staged = self.pool.view(slot, flat.numel())
            staged.copy_(flat)
            if not self.send(req_id, staged):
                log.debug("attempt %d for %s refused", attempt, req_id)
                continue
            self.pool.recycle_slot(slot)
            return True
        return False

    def push_async(self, req_id: str, kv: torch.Tensor) -> Optional[int]:
        if req_id in self._in_flight:
            return None
        slot = self.pool.obtain_slot()  # clean: recorded as in flight and recycled by on_sent or shutdown
        if slot < 0:
            return None
        flat = kv.contiguous().view(torch.uint8).flatten()
        self.pool.view(slot, flat.numel()).copy_(flat)
        self._in_flight[req_id] = slot
        return slot

    def on_sent(self, req_id: str) -> None:
        slot = self._in_flight.pop(req_id, None)
        if slot is not None:
            self.pool.recycle_slot(slot)

    def push_many(self, req_id: str, layers: List[torch.Tensor]) -> int:
        sent = 0
        for kv in layers:
            slot = self.pool.obtain_slot()  # leak: break on an oversized layer leaves this slot out
            if slot < 0:
                break
            flat = kv.contiguous().view(torch.uint8).flatten()
            if flat.numel() > self.pool.cfg.slot_bytes:
                log.error("layer of %s is too large", req_id)
                break
            self.pool.view(slot, flat.numel()).copy_(flat)
            sent += int(self.send(req_id, self.pool.view(slot, flat.numel())))
            self.pool.recycle_slot(slot)
        return sent

    def shutdown(self) -> None:
        for slot in self._in_flight.values():
            self.pool.recycle_slot(slot)
        self._in_flight.clear()
