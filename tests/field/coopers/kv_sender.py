"""Prefill-side KV shipping: registered regions, staging buffers, posted transfers."""
import itertools
import logging
import threading
import time
from collections import deque
from typing import Deque, Dict, List, NamedTuple, Optional, Tuple

import torch

logger = logging.getLogger(__name__)


class Region(NamedTuple):
    key: int
    addr: int
    length: int


class TransferAgent:
    """Thin layer over the NIC library. deregister / release must mirror register / post."""

    def __init__(self, nic) -> None:
        self._nic = nic
        self._keys = itertools.count(1)
        self._regions: Dict[int, Region] = {}
        self._inflight: Dict[int, str] = {}

    def register(self, t: torch.Tensor) -> Region:
        region = Region(next(self._keys), t.data_ptr(), t.numel() * t.element_size())
        self._nic.reg_mr(region.key, region.addr, region.length)
        self._regions[region.key] = region
        return region

    def deregister(self, region: Region) -> None:
        if self._regions.pop(region.key, None) is not None:
            self._nic.dereg_mr(region.key)

    def post(self, peer: str, region: Region, nbytes: int) -> int:
        xfer = next(self._keys)
        self._nic.write(xfer, peer, region.key, nbytes)
        self._inflight[xfer] = peer
        return xfer

    def poll(self, xfer: int) -> str:
        return self._nic.poll(xfer)

    def release(self, xfer: int) -> None:
        self._inflight.pop(xfer, None)
        self._nic.forget(xfer)


class StagingPool:
    def __init__(self, agent: TransferAgent, count: int, nbytes: int) -> None:
        self._agent = agent
        self._cv = threading.Condition()
        self._tensors = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(count)]
        self._regions: List[Region] = []
        self._free: Deque[int] = deque(range(count))
        for t in self._tensors:
            self._regions.append(agent.register(t))  # clean: kept in _regions, deregistered in close()

    def borrow(self, timeout: float = 1.0) -> Optional[int]:
        with self._cv:
            if not self._cv.wait_for(lambda: self._free, timeout):
                return None
            return self._free.popleft()

    def give_back(self, idx: int) -> None:
        with self._cv:
            self._free.append(idx)
            self._cv.notify()

    def view(self, idx: int) -> torch.Tensor:
        return self._tensors[idx]

    def region(self, idx: int) -> Region:
        return self._regions[idx]

    def close(self) -> None:
        for region in self._regions:
            self._agent.deregister(region)
        self._regions.clear()


class KVSender:
    POLL_S = 0.0005

    def __init__(self, agent: TransferAgent, staging: StagingPool) -> None:
        self.agent = agent
        self.staging = staging
        self.k_regions: List[Region] = []
        self.v_regions: List[Region] = []
        self.pending: Dict[str, List[Tuple[int, int]]] = {}

    def bind_caches(self, caches: List[Tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.unbind_caches()
        for k, v in caches:
            self.k_regions.append(self.agent.register(k))  # clean: deregistered in unbind_caches
            self.v_regions.append(self.agent.register(v))  # leak: unbind_caches clears the list of V regions without deregistering

    def unbind_caches(self) -> None:
        for region in self.k_regions:
            self.agent.deregister(region)
        self.k_regions.clear()
        self.v_regions.clear()

    def _wait(self, xfer: int, deadline: float) -> bool:
        while time.monotonic() < deadline:
            state = self.agent.poll(xfer)
            if state == "done":
                return True
            if state == "error":
                return False
            time.sleep(self.POLL_S)
        return False

    def send_sync(self, peer: str, payload: torch.Tensor) -> bool:
        idx = self.staging.borrow()  # clean: near miss, both ways through the wait end in the finally
        if idx is None:
            return False
        try:
            self.staging.view(idx)[: payload.numel()].copy_(payload)
            xfer = self.agent.post(peer, self.staging.region(idx), payload.numel())  # leak: an expired or failed wait returns without releasing the handle
            if not self._wait(xfer, time.monotonic() + 5.0):
                logger.warning("transfer to %s did not complete", peer)
                return False
            self.agent.release(xfer)
            return True
        finally:
            self.staging.give_back(idx)

    def send_direct(self, peer: str, layer: int, nbytes: int, retries: int = 3) -> bool:
        for attempt in range(retries):
            xfer = self.agent.post(peer, self.k_regions[layer], nbytes)  # clean: near miss, released after each attempt whatever came out
            ok = self._wait(xfer, time.monotonic() + 1.0)
            self.agent.release(xfer)
            if ok:
                return True
            logger.debug("layer %d attempt %d failed", layer, attempt)
        return False

    def send_adhoc(self, peer: str, t: torch.Tensor) -> bool:
        if not t.is_contiguous():
            return False
        region = self.agent.register(t)  # leak: a NIC that refuses the write returns through the handler without deregistering
        try:
            xfer = self.agent.post(peer, region, region.length)  # clean: released after the wait
        except ConnectionError:
            logger.warning("%s refused an ad-hoc transfer", peer)
            return False
        ok = self._wait(xfer, time.monotonic() + 5.0)
        self.agent.release(xfer)
        self.agent.deregister(region)
        return ok

    def enqueue(self, req_id: str, peer: str, chunks: List[torch.Tensor]) -> int:
        sent = self.pending.setdefault(req_id, [])
        for chunk in chunks:
            idx = self.staging.borrow(0.1)  # leak: a chunk larger than the staging buffer is left out with the buffer still borrowed
            if idx is None:
                break
            buf = self.staging.view(idx)
            if chunk.numel() > buf.numel():
                logger.error("%s: chunk of %d bytes skipped", req_id, chunk.numel())
                continue
            buf[: chunk.numel()].copy_(chunk)
            xfer = self.agent.post(peer, self.staging.region(idx), chunk.numel())  # clean: recorded in pending with its buffer, reaped later
            sent.append((xfer, idx))
        return len(sent)

    def reap(self) -> None:
        for req_id in list(self.pending):
            still = []
            for xfer, idx in self.pending[req_id]:
                if self.agent.poll(xfer) == "busy":
                    still.append((xfer, idx))
                    continue
                self.agent.release(xfer)
                self.staging.give_back(idx)
            if still:
                self.pending[req_id] = still
            else:
                del self.pending[req_id]

    def abort(self, req_id: str) -> None:
        for xfer, idx in self.pending.pop(req_id, ()):
            self.agent.release(xfer)
            self.staging.give_back(idx)

    def close(self) -> None:
        for req_id in list(self.pending):
            self.abort(req_id)
        self.unbind_caches()
        self.staging.close()
