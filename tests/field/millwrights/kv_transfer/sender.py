"""Prefill side."""
from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass, field
from typing import Callable, Protocol

import torch

from .staging import Credits, Region, StagingPool

log = logging.getLogger("kvx.send")


class Wire(Protocol):
    def post(self, peer: int, tag: str, region: Region, on_done: Callable[[bool], None]) -> None: ...

    def send(self, peer: int, tag: str, tensor: torch.Tensor) -> bool: ...


@dataclass
class Outgoing:
    request_id: str
    layer: int
    peer: int
    regions: list[Region] = field(default_factory=list)
    attempts: int = 0


class PrefillSender:
    def __init__(self, pool: StagingPool, wire: Wire, window: int = 8) -> None:
        self.pool = pool
        self.wire = wire
        self.credits = Credits(window)
        self.backlog: "queue.Queue[Outgoing]" = queue.Queue()
        self.failed: dict[str, int] = {}
        self._open: dict[str, Outgoing] = {}
        self._stop = threading.Event()

    def push_layer(self, request_id: str, layer: int, peer: int, kv: torch.Tensor) -> bool:
        region = self.pool.checkout(timeout=1.0)  # clean: near miss, checked in by the completion callback
        if region is None:
            return False
        region.write(kv)

        def done(ok: bool) -> None:
            if not ok:
                self.failed[request_id] = layer
            self.pool.checkin(region)

        self.wire.post(peer, f"{request_id}/{layer}", region, done)
        return True

    def push_layer_with_credit(self, request_id: str, layer: int, peer: int, kv: torch.Tensor) -> bool:
        if not self.credits.take(timeout=0.5):  # leak: the callback checks the region in and gives no credit back
            return False
        region = self.pool.checkout()  # clean: checked in by the callback
        if region is None:
            self.credits.give()
            return False
        region.write(kv)
        self.wire.post(peer, f"{request_id}/{layer}", region, lambda ok: self.pool.checkin(region))
        return True

    def push_metadata(self, request_id: str, peer: int, table: torch.Tensor) -> bool:
        if not self.credits.take(timeout=0.5):  # clean: given back in finally
            return False
        try:
            return self.wire.send(peer, f"{request_id}/meta", table)
        finally:
            self.credits.give()

    def push_split(self, request_id: str, layer: int, peer: int, k: torch.Tensor, v: torch.Tensor) -> bool:
        pair = self.pool.checkout_pair(timeout=0.2)  # clean: both are checked in after the send
        if pair is None:
            return False
        rk, rv = pair
        rk.write(k)
        rv.write(v)
        ok = self.wire.send(peer, f"{request_id}/{layer}/k", rk.tensor[: rk.used])
        ok = self.wire.send(peer, f"{request_id}/{layer}/v", rv.tensor[: rv.used]) and ok
        self.pool.checkin(rk)
        self.pool.checkin(rv)
        return ok

    def stage(self, request_id: str, layer: int, peer: int, pieces: list[torch.Tensor]) -> bool:
        """Queued and sent by the pump thread."""
        regions = self.pool.checkout_exactly(len(pieces))  # clean: near miss, moved into the item, the pump checks in
        if not regions:
            return False
        for region, piece in zip(regions, pieces):
            region.write(piece)
        self.backlog.put(Outgoing(request_id, layer, peer, regions))
        return True

    def pump(self) -> None:
        while not self._stop.is_set() or not self.backlog.empty():
            try:
                item = self.backlog.get(timeout=0.1)
            except queue.Empty:
                continue
            self._post(item)
            for region in item.regions:
                self.pool.checkin(region)
            item.regions.clear()

    def _post(self, item: Outgoing) -> None:
        for i, region in enumerate(item.regions):
            tag = f"{item.request_id}/{item.layer}.{i}"
            if not self.wire.send(item.peer, tag, region.tensor[: region.used]):
                self.failed[item.request_id] = item.layer
                return

    def send_with_retry(self, request_id: str, layer: int, peer: int, kv: torch.Tensor, tries: int) -> bool:
        for attempt in range(tries):
            region = self.pool.checkout(timeout=0.5)  # leak: a failed attempt goes round for a new region without check-in
            if region is None:
                continue
            region.write(kv)
            if self.wire.send(peer, f"{request_id}/{layer}", region.tensor[: region.used]):
                self.pool.checkin(region)
                return True
            log.warning("layer %d of %s: attempt %d failed", layer, request_id, attempt)
        return False

    def begin(self, request_id: str, peer: int, layers: int) -> bool:
        if request_id in self._open:
            return True
        regions = self.pool.checkout_exactly(layers)  # clean: kept under the request, end or abort checks in
        if len(regions) < layers:
            return False
        self._open[request_id] = Outgoing(request_id, 0, peer, regions)
        return True

    def end(self, request_id: str) -> None:
        out = self._open.pop(request_id, None)
        if out is None:
            return
        while out.regions:
            self.pool.checkin(out.regions.pop())

    def abort(self, request_id: str, why: str) -> None:
        log.info("abort %s: %s", request_id, why)
        self.end(request_id)

    def stop(self) -> None:
        self._stop.set()
        for request_id in list(self._open):
            self.abort(request_id, "shutdown")
