"""Request state machine of the serving core.

WAITING -> ENCODING -> PREFILL -> DECODE -> DONE, with ABORTED reachable from
everywhere.  A request collects what it needs on the way and gives everything
back through Resources.release_all().
"""
from __future__ import annotations

import enum
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger("core")


class Phase(enum.IntEnum):
    WAITING = 0
    ENCODING = 1
    PREFILL = 2
    DECODE = 3
    DONE = 4
    ABORTED = 5


class SeqSlots:
    def __init__(self, n: int):
        self._avail = set(range(n))

    def obtain(self) -> int | None:
        return self._avail.pop() if self._avail else None  # clean: returned to the caller

    def hand_back(self, slot: int) -> None:
        self._avail.add(slot)


class KVPool:
    def __init__(self, blocks: int):
        self._stack = list(range(blocks))
        self.lock = threading.Lock()

    def alloc(self, n: int) -> list[int] | None:
        with self.lock:
            if len(self._stack) < n:
                return None
            return [self._stack.pop() for _ in range(n)]  # clean: returned to the caller

    def free(self, ids: list[int]) -> None:
        with self.lock:
            self._stack.extend(ids)


class EncoderBudget:
    """Plain counter of encoder tokens in flight."""

    def __init__(self, total: int):
        self.total = total
        self.used = 0

    def charge(self, tokens: int) -> bool:
        if self.used + tokens > self.total:
            return False
        self.used += tokens
        return True

    def discharge(self, tokens: int) -> None:
        self.used -= tokens


@dataclass
class Resources:
    slot: int | None = None
    blocks: list[int] = field(default_factory=list)
    enc_tokens: int = 0


@dataclass
class Request:
    rid: str
    prompt: list[int]
    mm_tokens: int = 0
    priority: int = 0
    phase: Phase = Phase.WAITING
    res: Resources = field(default_factory=Resources)
    deadline: float = 0.0
    output: list[int] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)


class Core:
    def __init__(self, slots: SeqSlots, kv: KVPool, enc: EncoderBudget, runner, block: int = 16):
        self.slots = slots
        self.kv = kv
        self.enc = enc
        self.runner = runner
        self.block = block
        self.queue: deque[Request] = deque()
        self.live: dict[str, Request] = {}
        self.parked: dict[str, list[int]] = {}

    # --- release --------------------------------------------------------------

    def release_all(self, req: Request) -> None:
        r = req.res
        if r.slot is not None:
            self.slots.hand_back(r.slot)
            r.slot = None
        if r.blocks:
            self.kv.free(r.blocks)
            r.blocks = []
        if r.enc_tokens:
            self.enc.discharge(r.enc_tokens)
            r.enc_tokens = 0

    # --- admission ------------------------------------------------------------

    def admit(self, req: Request) -> bool:
        slot = self.slots.obtain()  # clean: stored on the request or handed back
        if slot is None:
            return False
        need = -(-len(req.prompt) // self.block)
        blocks = self.kv.alloc(need)  # clean: moved to req.res, release_all frees them
        if blocks is None:
            self.slots.hand_back(slot)
            return False
        req.res.slot = slot
        req.res.blocks = blocks
        req.phase = Phase.PREFILL
        self.live[req.rid] = req
        return True

    def admit_multimodal(self, req: Request) -> bool:
        if not self.enc.charge(req.mm_tokens):  # leak: charge is kept when admit() fails, enc_tokens is set only later
            return False
        if not self.admit(req):  # clean: near miss, the request owns slot and blocks once admit returns true
            self.queue.append(req)
            return False
        req.res.enc_tokens = req.mm_tokens
        req.phase = Phase.ENCODING
        return True

    def admit_resumed(self, req: Request, tokens: int) -> bool:
        """Decode side of a disaggregated prefill."""
        slot = self.slots.obtain()  # leak: a deadline already passed aborts without handing the slot back
        if slot is None:
            return False
        if req.deadline and time.monotonic() > req.deadline:
            req.phase = Phase.ABORTED
            return False
        req.res.slot = slot
        blocks = self.kv.alloc(-(-tokens // self.block))  # clean: joined to req.res.blocks
        if blocks is None:
            self.release_all(req)
            return False
        req.res.blocks.extend(blocks)
        self.live[req.rid] = req
        return True

    # --- running --------------------------------------------------------------

    def encode_done(self, req: Request) -> None:
        self.enc.discharge(req.res.enc_tokens)
        req.res.enc_tokens = 0
        req.phase = Phase.PREFILL

    def grow(self, req: Request) -> bool:
        if len(req.prompt) + len(req.output) < len(req.res.blocks) * self.block:
            return True
        more = self.kv.alloc(1)  # clean: near miss, preempt() frees the request's own list and more joins it
        if more is None:
            self.preempt(req)
            return False
        req.res.blocks += more
        return True

    def preempt(self, req: Request) -> None:
        self.live.pop(req.rid, None)
        self.release_all(req)
        req.phase = Phase.WAITING
        self.queue.appendleft(req)

    def lookahead(self, req: Request, k: int) -> int:
        """Blocks for k draft tokens, only for the coming step."""
        extra = self.kv.alloc(-(-k // self.block))  # leak: not freed when the runner accepts nothing
        if extra is None:
            return 0
        accepted = self.runner.speculate(req, extra, k)
        if not accepted:
            return 0
        keep = -(-len(accepted) // self.block)
        req.res.blocks.extend(extra[:keep])
        self.kv.free(extra[keep:])
        req.output.extend(accepted)
        return len(accepted)

    def park(self, req: Request) -> None:
        """Keep KV of a paused tool call, give the slot to others."""
        self.parked[req.rid] = req.res.blocks
        req.res.blocks = []
        self.live.pop(req.rid, None)
        self.release_all(req)

    def unpark(self, req: Request) -> bool:
        slot = self.slots.obtain()  # clean: handed back when nothing was parked, stored otherwise
        if slot is None:
            return False
        blocks = self.parked.pop(req.rid, None)  # clean: near miss, moved back onto the request
        if blocks is None:
            self.slots.hand_back(slot)
            return False
        req.res.slot, req.res.blocks = slot, blocks
        self.live[req.rid] = req
        return True

    def drop_parked(self, rid: str, notify: bool = True) -> None:
        blocks = self.parked.pop(rid, None)  # leak: without a listener the popped blocks are not freed
        if blocks is None:
            return
        if notify and not self.runner.has_listener(rid):
            log.debug("nobody listens for %s", rid)
            return
        self.runner.notify(rid, "expired")
        self.kv.free(blocks)

    # --- end ------------------------------------------------------------------

    def finish(self, req: Request) -> None:
        self.live.pop(req.rid, None)
        req.phase = Phase.DONE
        self.release_all(req)

    def sweep(self, now: float) -> int:
        n = 0
        for rid in [r.rid for r in self.live.values() if r.deadline and r.deadline < now]:
            req = self.live.pop(rid)  # leak: requests still encoding are marked and forgotten with their slot and blocks
            if req.phase == Phase.ENCODING:
                req.phase = Phase.ABORTED
                continue
            self.release_all(req)
            n += 1
        return n

    def step(self) -> None:
        while self.queue:
            req = self.queue.popleft()
            ok = self.admit(req)  # clean: near miss, a refused request holds nothing when it is requeued
            if not ok:
                self.queue.appendleft(req)
                break
        for req in list(self.live.values()):
            if req.phase == Phase.ABORTED or not self.grow(req):  # clean: near miss, the block lives in the request or it was preempted
                continue
            tok = self.runner.decode(req)
            if tok is None:
                self.finish(req)
            else:
                req.output.append(tok)
