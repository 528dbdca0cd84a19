"""Prefill-side KV sender: stages layers in pinned memory and posts writes to the decode peer."""
from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Optional

import torch

logger = logging.getLogger(__name__)


@dataclass
class StagingBuffer:
    index: int
    data: torch.Tensor
    used: int = 0


class StagingPool:
    def __init__(self, count: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._free: deque[StagingBuffer] = deque(
            StagingBuffer(i, torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)) for i in range(count)
        )

    def take(self) -> Optional[StagingBuffer]:
        if not self._free:
            return None
        buf = self._free.popleft()
        buf.used = 0
        return buf

    def give(self, buf: StagingBuffer) -> None:
        self._free.append(buf)


class XferAgent:
    def __init__(self) -> None:
        self._next = 0
        self._live: dict[int, str] = {}
        self._done: set[int] = set()

    def prep(self, peer: str, offset: int, length: int) -> int:
        self._next += 1
        self._live[self._next] = f"{peer}:{offset}+{length}"
        return self._next

    def state(self, handle: int) -> str:
        return "done" if handle in self._done else "pending"

    def release(self, handle: int) -> None:
        self._live.pop(handle, None)
        self._done.discard(handle)


@dataclass
class SendRequest:
    rid: str
    peer: str
    handles: list[int] = field(default_factory=list)


class KVSender:
    def __init__(self, pool: StagingPool, agent: XferAgent, timeout: float = 2.0) -> None:
        self.pool = pool
        self.agent = agent
        self.timeout = timeout
        self.inflight: dict[int, StagingBuffer] = {}
        self.first_tokens: dict[str, StagingBuffer] = {}

    def _wait(self, handle: int) -> bool:
        deadline = time.monotonic() + self.timeout
        while time.monotonic() < deadline:
            if self.agent.state(handle) == "done":
                return True
            time.sleep(0.0005)
        return False

    def _stage(self, raw: torch.Tensor) -> Optional[StagingBuffer]:
        buf = self.pool.take()  # clean: handed to the caller, None when the pool is dry
        if buf is not None:
            buf.data[: raw.numel()].copy_(raw, non_blocking=True)
            buf.used = raw.numel()
        return buf

    def send_layer(self, req: SendRequest, layer: int, kv: torch.Tensor) -> bool:
        raw = kv.contiguous().view(torch.uint8).flatten()
        buf = self.pool.take()  # leak: the size check returns False with the buffer still out
        if buf is None:
            return False
        if raw.numel() > self.pool.nbytes:
            logger.warning("layer %d of %s does not fit staging (%d bytes)", layer, req.rid, raw.numel())
            return False
        buf.data[: raw.numel()].copy_(raw, non_blocking=True)
        buf.used = raw.numel()
        handle = self.agent.prep(req.peer, layer * self.pool.nbytes, buf.used)  # clean: filed in inflight, poll or abort releases it
        self.inflight[handle] = buf
        req.handles.append(handle)
        return True

    def send_split(self, req: SendRequest, k: torch.Tensor, v: torch.Tensor) -> bool:
        k_buf = self._stage(k.view(torch.uint8).flatten())  # leak: not returned when no buffer is left for V
        if k_buf is None:
            return False
        v_buf = self._stage(v.view(torch.uint8).flatten())  # clean: near miss, None leaves nothing here, otherwise filed in inflight
        if v_buf is None:
            return False
        for part, buf in enumerate((k_buf, v_buf)):
            handle = self.agent.prep(req.peer, part * self.pool.nbytes, buf.used)  # clean: near miss, each turn files its own handle
            self.inflight[handle] = buf
            req.handles.append(handle)
        return True

    def send_aux(self, req: SendRequest, payload: torch.Tensor) -> bool:
        if payload.numel() > self.pool.nbytes:
            return False
        buf = self._stage(payload)  # clean: near miss, the finally gives it back on every return
        if buf is None:
            return False
        try:
            for _ in range(2):
                handle = self.agent.prep(req.peer, 0, buf.used)  # clean: near miss, released before the next attempt
                ok = self._wait(handle)
                self.agent.release(handle)
                if ok:
                    return True
            return False
        finally:
            self.pool.give(buf)

    def resend(self, req: SendRequest, buf: StagingBuffer, attempts: int = 3) -> bool:
        for attempt in range(attempts):
            handle = self.agent.prep(req.peer, 0, buf.used)  # leak: a timed-out attempt keeps its handle
            if self._wait(handle):
                self.agent.release(handle)
                return True
            logger.info("resend %d/%d of %s timed out", attempt + 1, attempts, req.rid)
        return False

    def publish_first_token(self, req: SendRequest, token: torch.Tensor) -> None:
        buf = self._stage(token.view(torch.uint8).flatten())  # leak: abort never looks into first_tokens
        if buf is None:
            raise RuntimeError("staging exhausted")
        self.first_tokens[req.rid] = buf

    def confirm(self, rid: str) -> None:
        buf = self.first_tokens.pop(rid, None)
        if buf is not None:
            self.pool.give(buf)

    def poll(self) -> int:
        finished = 0
        for handle in list(self.inflight):
            if self.agent.state(handle) != "done":
                continue
            self.pool.give(self.inflight.pop(handle))
            self.agent.release(handle)
            finished += 1
        return finished

    def abort(self, req: SendRequest) -> None:
        for handle in req.handles:
            buf = self.inflight.pop(handle, None)
            if buf is not None:
                self.agent.release(handle)
                self.pool.give(buf)
        req.handles.clear()


def run_prefill(sender: KVSender, req: SendRequest, layers: list[torch.Tensor], token: torch.Tensor) -> bool:
    for i, kv in enumerate(layers):
        if not sender.send_layer(req, i, kv):
            sender.abort(req)
            return False
    sender.publish_first_token(req, token)
    return True


def wait_for_decode(sender: KVSender, req: SendRequest, cancelled: set[str]) -> bool:
    while any(h in sender.inflight for h in req.handles):
        if req.rid in cancelled:
            sender.abort(req)
            return False
        sender.poll()
    sender.confirm(req.rid)
    return True
