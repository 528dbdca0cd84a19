"""Prefill/decode disaggregation: KV pages go over RDMA from a prefill node to a decode node."""
from __future__ import annotations

import enum
import logging
import threading
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional, Sequence

logger = logging.getLogger(__name__)


class PageBitmap:
    """Decode-side pages, tracked in a bytearray."""

    def __init__(self, n: int):
        self._map = bytearray(n)
        self._hint = 0

    def claim_page(self) -> int:
        n = len(self._map)
        for off in range(n):
            i = (self._hint + off) % n
            if not self._map[i]:
                self._map[i] = 1
                self._hint = i + 1
                return i
        return -1

    def claim_run(self, count: int) -> Optional[range]:
        run = 0
        for i, used in enumerate(self._map):
            run = 0 if used else run + 1
            if run == count:
                first = i - count + 1
                self._map[first:i + 1] = b"\x01" * count
                return range(first, i + 1)
        return None

    def unclaim(self, pages: Sequence[int]) -> None:
        for p in pages:
            self._map[p] = 0


class RegionRegistry:
    """Registered memory regions, reference counted by base address."""

    def __init__(self, nic):
        self.nic = nic
        self._refs: Dict[int, int] = {}
        self._keys: Dict[int, int] = {}

    def register(self, base: int, length: int) -> int:
        if base not in self._refs:
            self._keys[base] = self.nic.reg_mr(base, length)  # clean: kept in _keys, deregistered with the last reference
            self._refs[base] = 0
        self._refs[base] += 1
        return self._keys[base]

    def deregister(self, base: int) -> None:
        self._refs[base] -= 1
        if self._refs[base] == 0:
            del self._refs[base]
            self.nic.dereg_mr(self._keys.pop(base))


class QPairs:
    """Queue pairs to a peer; a stack with an upper bound."""

    def __init__(self, nic, cap: int):
        self.nic = nic
        self.cap = cap
        self.made = 0
        self._stack: List[object] = []
        self._cond = threading.Condition()

    def pop_qp(self):
        with self._cond:
            while not self._stack and self.made >= self.cap:
                self._cond.wait()
            if self._stack:
                return self._stack.pop()
            self.made += 1
        return self.nic.create_qp()

    def pop_ready(self):
        with self._cond:
            for _ in range(len(self._stack)):
                qp = self._stack.pop()  # leak: a queue pair in an error state is dropped while it still counts as made
                if qp.state == "RTS":
                    return qp
        return None

    def push_qp(self, qp) -> None:
        with self._cond:
            self._stack.append(qp)
            self._cond.notify()


class Phase(enum.Enum):
    WAITING = 0
    SENDING = 1
    DONE = 2
    FAILED = 3


@dataclass
class Handoff:
    rid: str
    pages: List[int] = field(default_factory=list)
    phase: Phase = Phase.WAITING
    owns_pages: bool = True


class DecodeReceiver:
    def __init__(self, pages: PageBitmap, page_tokens: int):
        self.pages = pages
        self.page_tokens = page_tokens
        self.handoffs: Dict[str, Handoff] = {}

    def reserve(self, rid: str, tokens: int) -> Optional[Handoff]:
        if rid in self.handoffs:
            return self.handoffs[rid]
        want = -(-tokens // self.page_tokens)
        got: List[int] = []
        while len(got) < want:
            p = self.pages.claim_page()  # clean: near miss, a short reservation unclaims all that it got
            if p < 0:
                self.pages.unclaim(got)
                return None
            got.append(p)
        h = Handoff(rid, got)
        self.handoffs[rid] = h
        return h

    def reserve_contiguous(self, rid: str, tokens: int) -> Optional[Handoff]:
        run = self.pages.claim_run(-(-tokens // self.page_tokens))  # leak: not unclaimed when the request has a handoff already
        if run is None:
            return None
        if rid in self.handoffs:
            logger.warning("%s reserved twice", rid)
            return self.handoffs[rid]
        h = self.handoffs[rid] = Handoff(rid, list(run))
        return h

    def reserve_hybrid(self, rid: str, tokens: int, tail_tokens: int) -> Optional[Handoff]:
        """Contiguous body, scattered tail."""
        if rid in self.handoffs:
            return None
        body = self.pages.claim_run(tokens // self.page_tokens)  # clean: unclaimed when the tail finds no page, else in the handoff
        if body is None:
            return None
        tail: List[int] = []
        for _ in range(-(-tail_tokens // self.page_tokens)):
            p = self.pages.claim_page()  # leak: only the body is unclaimed when the tail runs short
            if p < 0:
                self.pages.unclaim(body)
                return None
            tail.append(p)
        h = self.handoffs[rid] = Handoff(rid, [*body, *tail])
        return h

    def adopt(self, rid: str) -> List[int]:
        """The decode engine takes the pages over; it unclaims them itself."""
        h = self.handoffs[rid]
        h.owns_pages = False
        return h.pages

    def drop(self, rid: str) -> None:
        h = self.handoffs.pop(rid, None)
        if h is not None and h.owns_pages:
            self.pages.unclaim(h.pages)


class PrefillSender:
    def __init__(self, nic, regions: RegionRegistry, qps: QPairs):
        self.nic = nic
        self.regions = regions
        self.qps = qps
        self.bases: Dict[str, int] = {}
        self.done: Dict[str, Phase] = {}

    def attach(self, rid: str, base: int, length: int) -> int:
        if rid in self.bases:
            raise KeyError(f"{rid} is attached")
        key = self.regions.register(base, length)  # clean: deregistered by detach() through self.bases
        self.bases[rid] = base
        return key

    def detach(self, rid: str) -> None:
        base = self.bases.pop(rid, None)
        if base is not None:
            self.regions.deregister(base)

    def send(self, rid: str, remote: Sequence[int]) -> bool:
        qp = self.qps.pop_qp()  # clean: pushed in finally
        try:
            for page in remote:
                if not qp.write(self.bases[rid], page):
                    self.done[rid] = Phase.FAILED
                    return False
            self.done[rid] = Phase.DONE
            return True
        finally:
            self.qps.push_qp(qp)

    def send_async(self, rid: str, remote: Sequence[int], cb: Callable[[str, bool], None]) -> None:
        qp = self.qps.pop_qp()  # clean: near miss, the completion callback pushes it

        def on_complete(ok: bool) -> None:
            self.qps.push_qp(qp)
            self.done[rid] = Phase.DONE if ok else Phase.FAILED
            cb(rid, ok)

        qp.write_many(self.bases[rid], list(remote), on_complete)

    def send_async_layers(self, rid: str, layers: Sequence[Sequence[int]], cb: Callable[[str, bool], None]) -> None:
        qp = self.qps.pop_qp()  # leak: the completion callback pushes it only when every layer went well
        left = len(layers)

        def on_layer(ok: bool) -> None:
            nonlocal left
            left -= 1
            if not ok:
                self.done[rid] = Phase.FAILED
                cb(rid, False)
                return
            if left == 0:
                self.qps.push_qp(qp)
                cb(rid, True)

        for pages in layers:
            qp.write_many(self.bases[rid], list(pages), on_layer)

    def send_oneshot(self, rid: str, base: int, length: int, remote: Sequence[int]) -> bool:
        """For payloads outside the KV cache (logits, hidden states)."""
        key = self.regions.register(base, length)  # leak: not deregistered when no ready queue pair exists
        qp = self.qps.pop_ready()  # clean: pushed after the write
        if qp is None:
            logger.info("%s: no ready queue pair", rid)
            return False
        ok = qp.write_key(key, list(remote))
        self.qps.push_qp(qp)
        self.regions.deregister(base)
        return ok
