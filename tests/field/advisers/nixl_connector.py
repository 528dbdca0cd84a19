"""KV pull connector: memory registration, remote agents and transfer handles."""
from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field

import torch


@dataclass
class XferHandle:
    xid: int
    peer: str
    state: str = "INIT"


class TransferAgent:
    def __init__(self, name: str, max_handles: int = 4096) -> None:
        self.name = name
        self.max_handles = max_handles
        self._next = 0
        self._handles: dict[int, XferHandle] = {}
        self._regions: dict[int, tuple[int, int]] = {}
        self._peers: dict[str, bytes] = {}

    def register_memory(self, tensor: torch.Tensor) -> int:
        self._next += 1
        self._regions[self._next] = (tensor.data_ptr(), tensor.nbytes)
        return self._next

    def deregister_memory(self, region: int) -> None:
        self._regions.pop(region, None)

    def prep_xfer(self, peer: str, block_ids: list[int]) -> XferHandle | None:
        if len(self._handles) >= self.max_handles:
            return None
        self._next += 1
        handle = XferHandle(self._next, peer)
        self._handles[handle.xid] = handle
        return handle

    def post(self, handle: XferHandle) -> bool:
        handle.state = "PROC" if handle.peer in self._peers else "ERR"
        return handle.state != "ERR"

    def on_notif(self, xid: int, ok: bool) -> None:
        if xid in self._handles:
            self._handles[xid].state = "DONE" if ok else "ERR"

    def check(self, handle: XferHandle) -> str:
        return handle.state

    def release_xfer(self, handle: XferHandle) -> None:
        self._handles.pop(handle.xid, None)

    def add_remote_agent(self, meta: bytes) -> str:
        peer = meta.decode()
        self._peers[peer] = meta
        return peer

    def remove_remote_agent(self, peer: str) -> None:
        self._peers.pop(peer, None)


@dataclass
class ReqMeta:
    req_id: str
    peer: str
    local_blocks: list[int]
    layer_groups: list[list[int]] = field(default_factory=list)


class NixlConnectorWorker:
    def __init__(self, agent: TransferAgent, timeout_s: float = 30.0) -> None:
        self.agent = agent
        self.timeout_s = timeout_s
        self.regions: list[int] = []
        self.scratch_region: int | None = None
        self.peers: dict[str, str] = {}
        self._recving: dict[str, list[tuple[XferHandle, float]]] = defaultdict(list)
        self._sending: dict[str, XferHandle] = {}
        self._probes: dict[str, XferHandle] = {}

    def register_kv_caches(self, caches: dict[str, torch.Tensor]) -> None:
        for cache in caches.values():
            self.regions.append(self.agent.register_memory(cache))  # clean: kept in regions, which close() deregisters

    def set_scratch(self, scratch: torch.Tensor) -> None:
        if scratch.numel() == 0:
            return
        self.scratch_region = self.agent.register_memory(scratch)  # leak: a second scratch tensor overwrites the region of the first

    def handshake(self, engine_id: str, meta: bytes) -> str:
        if engine_id in self.peers:
            return self.peers[engine_id]
        peer = self.agent.add_remote_agent(meta)  # clean: near miss, kept by engine id, removed in close()
        self.peers[engine_id] = peer
        return peer

    def probe_peer(self, meta: bytes) -> bool:
        peer = self.agent.add_remote_agent(meta)  # leak: a peer that has no handle to spare returns before remove_remote_agent
        handle = self.agent.prep_xfer(peer, [])  # clean: released right after the post
        if handle is None:
            return False
        alive = self.agent.post(handle)
        self.agent.release_xfer(handle)
        self.agent.remove_remote_agent(peer)
        return alive

    def start_load_kv(self, metas: list[ReqMeta]) -> list[str]:
        failed = []
        for meta in metas:
            handle = self.agent.prep_xfer(meta.peer, meta.local_blocks)  # leak: when post fails the handle is neither tracked nor released
            if handle is None:
                failed.append(meta.req_id)
                continue
            if not self.agent.post(handle):
                failed.append(meta.req_id)
                continue
            self._recving[meta.req_id].append((handle, time.monotonic()))
        return failed

    def start_layerwise(self, meta: ReqMeta) -> bool:
        handles: list[XferHandle] = []
        for group in meta.layer_groups:
            handle = self.agent.prep_xfer(meta.peer, group)  # clean: near miss, the failing path releases this one and those before it
            if handle is None or not self.agent.post(handle):
                if handle is not None:
                    handles.append(handle)
                for h in handles:
                    self.agent.release_xfer(h)
                return False
            handles.append(handle)
        now = time.monotonic()
        self._recving[meta.req_id].extend((h, now) for h in handles)
        return True

    def get_finished(self) -> set[str]:
        done = set()
        for req_id, entries in list(self._recving.items()):
            waiting = []
            for handle, started in entries:
                state = self.agent.check(handle)
                if state == "PROC" and time.monotonic() - started < self.timeout_s:
                    waiting.append((handle, started))
                    continue
                self.agent.release_xfer(handle)
            if waiting:
                self._recving[req_id] = waiting
            else:
                del self._recving[req_id]
                done.add(req_id)
        return done

    def push_kv(self, meta: ReqMeta) -> bool:
        stale = self._sending.pop(meta.req_id, None)
        if stale is not None:
            self.agent.release_xfer(stale)
        handle = self.agent.prep_xfer(meta.peer, meta.local_blocks)  # clean: near miss, the stale handle was released and this one goes at ack
        if handle is None:
            return False
        self._sending[meta.req_id] = handle
        return self.agent.post(handle)

    def on_ack(self, req_id: str) -> None:
        handle = self._sending.pop(req_id, None)
        if handle is not None:
            self.agent.release_xfer(handle)

    def start_probe(self, engine_id: str) -> None:
        if engine_id in self._probes:
            return
        handle = self.agent.prep_xfer(self.peers[engine_id], [])  # leak: reap_probes drops the failed ones without releasing them
        if handle is not None:
            self.agent.post(handle)
            self._probes[engine_id] = handle

    def reap_probes(self) -> None:
        for engine_id in list(self._probes):
            state = self.agent.check(self._probes[engine_id])
            if state == "PROC":
                continue
            handle = self._probes.pop(engine_id)
            if state == "DONE":
                self.agent.release_xfer(handle)

    def copy_blocks(self, meta: ReqMeta, deadline: float) -> bool:
        handle = self.agent.prep_xfer(meta.peer, meta.local_blocks)  # clean: near miss, the finally covers the timeout as well
        if handle is None:
            return False
        try:
            if not self.agent.post(handle):
                return False
            while self.agent.check(handle) == "PROC":
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.001)
            return True
        finally:
            self.agent.release_xfer(handle)

    def close(self) -> None:
        for region in self.regions:
            self.agent.deregister_memory(region)
        if self.scratch_region is not None:
            self.agent.deregister_memory(self.scratch_region)
        for handle in [*self._sending.values(), *self._probes.values()]:
            self.agent.release_xfer(handle)
        for entries in self._recving.values():
            for handle, _ in entries:
                self.agent.release_xfer(handle)
        for peer in self.peers.values():
            self.agent.remove_remote_agent(peer)
        self.regions.clear()
