"""The prefill side: stages blocks and pushes them to the decode peer."""
from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional

from .blocks import BlockAllocator
from .memory import RegistrationCache, StagingPool

log = logging.getLogger(__name__)


@dataclass
class Outgoing:
    rid: str
    buf: bytearray
    handle: int


class PrefillSender:
    def __init__(self, alloc: BlockAllocator, staging: StagingPool, regs: RegistrationCache,
                 post: Callable[..., bool]) -> None:
        self.alloc = alloc
        self.staging = staging
        self.regs = regs
        self.post = post
        self.in_flight: Dict[str, Outgoing] = {}

    def send(self, rid: str, payload: bytes) -> bool:
        buf = self.staging.checkout()  # leak: not checked in where the post is refused
        if buf is None:
            return False
        buf[: len(payload)] = payload
        handle = self.regs.register(buf)  # clean: deregistered on refusal, else owned by the outgoing entry
        if not self.post(rid, handle, len(payload)):
            self.regs.deregister(handle)
            return False
        self.in_flight[rid] = Outgoing(rid, buf, handle)
        return True

    def send_inline(self, rid: str, payload: bytes) -> bool:
        if len(payload) > self.staging.size:
            return False
        buf = self.staging.checkout()  # clean: checked in in the finally
        if buf is None:
            return False
        handle = self.regs.register(buf)  # clean: deregistered in the finally
        try:
            buf[: len(payload)] = payload
            return self.post(rid, handle, len(payload))
        finally:
            self.regs.deregister(handle)
            self.staging.checkin(buf)

    def send_layers(self, rid: str, layers: List[bytes]) -> int:
        sent = 0
        for i, layer in enumerate(layers):
            buf = self.staging.checkout()  # leak: the continue for an empty layer skips the checkin
            if buf is None:
                break
            if not layer:
                log.debug("layer %d of %s is empty", i, rid)
                continue
            buf[: len(layer)] = layer
            if self.post(rid, i, len(layer)):
                sent += 1
            self.staging.checkin(buf)
        return sent

    def on_complete(self, rid: str) -> None:
        out = self.in_flight.pop(rid, None)
        if out is None:
            return
        self.regs.deregister(out.handle)
        self.staging.checkin(out.buf)

    def send_pair(self, rid: str, k: bytes, v: bytes) -> bool:
        kbuf = self.staging.checkout()  # clean: near miss, checked in where there is no second buffer
        vbuf = self.staging.checkout() if kbuf is not None else None  # clean: near miss, not reached without kbuf; checked in at the end
        if kbuf is None or vbuf is None:
            if kbuf is not None:
                self.staging.checkin(kbuf)
            return False
        kbuf[: len(k)], vbuf[: len(v)] = k, v
        ok = self.post(rid, 0, len(k)) and self.post(rid, 1, len(v))
        self.staging.checkin(kbuf)
        self.staging.checkin(vbuf)
        return ok

    def resend(self, rid: str, payload: bytes, tries: int) -> bool:
        handle: Optional[int] = None
        buf = bytearray(payload)
        for _ in range(tries):
            handle = self.regs.register(buf)  # leak: each retry rebinds the handle of the failed one
            if self.post(rid, handle, len(buf)):
                break
        else:
            return False
        if handle is not None:
            self.regs.deregister(handle)
        return True
