"""Disaggregated prefill/decode: registered regions, transfer handles and notifications."""
from __future__ import annotations

import logging
import time
import uuid
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Region:
    key: str
    addr: int
    length: int


class Agent:
    """In-process model of a transfer agent. Regions and handles have to be returned."""

    def __init__(self, name: str, max_handles: int = 256) -> None:
        self.name = name
        self.max_handles = max_handles
        self.link_up = True
        self.regions: dict[str, Region] = {}
        self.handles: dict[int, str] = {}
        self.peers: dict[str, int] = defaultdict(int)
        self._next = 1

    def register(self, t: torch.Tensor) -> Region:
        r = Region(uuid.uuid4().hex, t.data_ptr(), t.numel() * t.element_size())
        self.regions[r.key] = r
        return r

    def deregister(self, r: Region) -> None:
        self.regions.pop(r.key, None)

    def connect(self, peer: str) -> bool:
        if not peer:
            return False
        self.peers[peer] += 1
        return True

    def disconnect(self, peer: str) -> None:
        self.peers[peer] -= 1
        if self.peers[peer] <= 0:
            del self.peers[peer]

    def prepare(self, local: Region, remote_key: str) -> int | None:
        if local.key not in self.regions or len(self.handles) >= self.max_handles:
            return None
        h = self._next
        self._next += 1
        self.handles[h] = "PREP"
        return h

    def post(self, h: int) -> str:
        self.handles[h] = "DONE" if self.link_up else "ERR"
        return self.handles[h]

    def state(self, h: int) -> str:
        return self.handles[h]

    def release(self, h: int) -> None:
        self.handles.pop(h, None)


class RegionGuard:
    """Context manager around a temporary registration."""

    def __init__(self, agent: Agent, t: torch.Tensor) -> None:
        self.agent = agent
        self.t = t
        self.region: Region | None = None

    def __enter__(self) -> Region:
        self.region = self.agent.register(self.t)  # clean: near miss, __exit__ deregisters it before it looks at the exception
        return self.region

    def __exit__(self, et, ev, tb) -> bool:
        if self.region is not None:
            self.agent.deregister(self.region)
            self.region = None
        if et is not None:
            logger.error("transfer body failed: %s", ev)
        return False


@dataclass
class Transfer:
    req_id: str
    handle: int
    deadline: float
    local: Region | None = None
    retries: int = 0


class KVSender:
    def __init__(self, agent: Agent, cache: list[torch.Tensor]) -> None:
        self.agent = agent
        self.cache_regions = [agent.register(t) for t in cache]  # clean: near miss, kept for the life of the sender, deregistered by close()
        self.inflight: dict[str, list[Transfer]] = defaultdict(list)
        self.done: set[str] = set()

    def _start(self, req_id: str, local: Region, remote: str, owned: Region | None = None) -> bool:
        h = self.agent.prepare(local, remote)  # clean: near miss, released when posting fails, else polled as a Transfer
        if h is None:
            return False
        if self.agent.post(h) == "ERR":
            self.agent.release(h)
            return False
        self.inflight[req_id].append(Transfer(req_id, h, time.monotonic() + 30, owned))
        return True

    def send_layer(self, req_id: str, layer: int, remote: str) -> bool:
        return self._start(req_id, self.cache_regions[layer], remote)  # clean: lives in inflight until poll() or abort()

    def send_tensor(self, req_id: str, t: torch.Tensor, remote: str) -> bool:
        region = self.agent.register(t)  # leak: a transfer that does not start leaves the region registered with no owner
        return self._start(req_id, region, remote, owned=region)  # clean: lives in inflight until poll() or abort()

    def send_checked(self, req_id: str, t: torch.Tensor, remote: str) -> bool:
        region = self.agent.register(t)  # clean: near miss, deregistered when the start is refused, otherwise with the transfer
        if self._start(req_id, region, remote, owned=region):  # clean: lives in inflight until poll() or abort()
            return True
        self.agent.deregister(region)
        return False

    def _close_transfer(self, tr: Transfer) -> None:
        self.agent.release(tr.handle)
        if tr.local is not None:
            self.agent.deregister(tr.local)

    def poll(self) -> set[str]:
        finished: set[str] = set()
        for req_id, transfers in list(self.inflight.items()):
            rest = []
            for tr in transfers:
                if self.agent.state(tr.handle) in ("DONE", "ERR") or time.monotonic() > tr.deadline:
                    self._close_transfer(tr)
                else:
                    rest.append(tr)
            if rest:
                self.inflight[req_id] = rest
            else:
                del self.inflight[req_id]
                finished.add(req_id)
        self.done |= finished
        return finished

    def abort(self, req_id: str) -> None:
        for tr in self.inflight.pop(req_id, ()):
            self._close_transfer(tr)

    def close(self) -> None:
        for req_id in list(self.inflight):
            self.abort(req_id)
        for r in self.cache_regions:
            self.agent.deregister(r)
        self.cache_regions = []


class KVReceiver:
    def __init__(self, agent: Agent, workers: int = 2) -> None:
        self.agent = agent
        self.pool = ThreadPoolExecutor(workers)
        self.landing: dict[str, Region] = {}

    def expect(self, req_id: str, t: torch.Tensor) -> str:
        stale = self.landing.pop(req_id, None)
        if stale is not None:
            self.agent.deregister(stale)
        self.landing[req_id] = self.agent.register(t)  # clean: near miss, a stale one was removed first, arrived() deregisters this
        return self.landing[req_id].key

    def arrived(self, req_id: str) -> None:
        self.agent.deregister(self.landing.pop(req_id))

    def pull_sync(self, t: torch.Tensor, remote: str, attempts: int = 3) -> bool:
        region = self.agent.register(t)  # clean: deregistered in the finally
        try:
            for _ in range(attempts):
                h = self.agent.prepare(region, remote)  # leak: an attempt that ends in ERR is retried with a new handle, the old one unreleased
                if h is None:
                    return False
                if self.agent.post(h) == "DONE":
                    self.agent.release(h)
                    return True
            return False
        finally:
            self.agent.deregister(region)

    def pull(self, peer: str, t: torch.Tensor, remote: str) -> bool:
        if not self.agent.connect(peer):  # leak: a region that cannot be prepared returns False while still connected
            return False
        with RegionGuard(self.agent, t) as region:  # clean: near miss, the guard deregisters, on the early return too
            h = self.agent.prepare(region, remote)  # clean: released after the post
            if h is None:
                return False
            state = self.agent.post(h)
            self.agent.release(h)
        self.agent.disconnect(peer)
        return state == "DONE"

    def pull_async(self, t: torch.Tensor, remote: str) -> Future[str]:
        region = self.agent.register(t)  # clean: near miss, the done callback deregisters it for every outcome
        fut = self.pool.submit(self._run, region, remote)
        fut.add_done_callback(lambda _: self.agent.deregister(region))
        return fut

    def _run(self, region: Region, remote: str) -> str:
        h = self.agent.prepare(region, remote)  # leak: the state is returned and the handle never released
        if h is None:
            return "ERR"
        return self.agent.post(h)

    def handshake(self, peers: list[str]) -> list[str]:
        up: list[str] = []
        for p in peers:
            if not self.agent.connect(p):  # clean: near miss, on the first refusal all earlier ones are disconnected
                for q in up:
                    self.agent.disconnect(q)
                return []
            up.append(p)
        return up

    def goodbye(self, peers: list[str]) -> None:
        for p in peers:
            self.agent.disconnect(p)
