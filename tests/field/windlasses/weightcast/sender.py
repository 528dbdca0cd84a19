from __future__ import annotations

import logging
from typing import Callable, Iterable

import torch

from .buckets import BucketPool, ScaledBuckets
from .lanes import LaneSet, lane
from .util import checksum, group_by_size

log = logging.getLogger("weightcast")

Push = Callable[[int, torch.Tensor], bool]


class WeightSender:
    def __init__(self, pool: BucketPool, lanes: LaneSet, push: Push, scale: float = 1.0) -> None:
        self.pool = pool
        self.scaled = ScaledBuckets(pool, scale)
        self.lanes = lanes
        self.push = push
        self.unacked: dict[int, tuple[int, torch.Tensor]] = {}
        self._next = 0

    def send_sync(self, params: Iterable[torch.Tensor]) -> int:
        sent = 0
        for group in group_by_size(params, self.pool.numel):
            with lane(self.lanes) as i:  # clean: with, the break included
                if i < 0:
                    break
                flat = self.scaled.packed(group)  # clean: restocked right after the push
                if flat is None:
                    break
                ok = self.push(i, flat)
                self.scaled.restock(flat)
                sent += ok
        return sent

    def send_async(self, group: list[torch.Tensor]) -> int | None:
        """Posts one bucket; on_ack() or abort() ends it. Returns a ticket."""
        i = self.lanes.seize()  # clean: ceded when no bucket was packed, else in unacked
        if i < 0:
            return None
        flat = self.scaled.packed(group)  # clean: near miss, stored in unacked with its lane
        if flat is None:
            self.lanes.cede(i)
            return None
        self._next += 1
        self.unacked[self._next] = (i, flat)
        self.push(i, flat)
        return self._next

    def on_ack(self, ticket: int) -> None:
        pair = self.unacked.pop(ticket, None)
        if pair is not None:
            self.lanes.cede(pair[0])
            self.scaled.restock(pair[1])

    def abort(self) -> None:
        for ticket in list(self.unacked):
            self.on_ack(ticket)

    def fingerprint(self, params: Iterable[torch.Tensor]) -> float:
        total = 0.0
        for group in group_by_size(params, self.pool.numel):
            flat = self.scaled.packed(group)  # leak: summed and dropped, never restocked
            if flat is None:
                continue
            total += checksum(flat)
        return total

    def barrier(self) -> bool:
        held = self.lanes.seize_all()  # leak: return on the first lane that fails leaves the rest seized
        if not held:
            return False
        token = torch.zeros(1)
        for i in held:
            if not self.push(i, token):
                log.error("lane %d failed in the barrier", i)
                return False
            self.lanes.cede(i)
        return True

    def resend(self, group: list[torch.Tensor], tries: int) -> bool:
        flat = self.scaled.packed(group)  # clean: restocked after the loop whatever came of it
        if flat is None:
            return False
        ok = False
        for _ in range(tries):
            i = self.lanes.seize()  # leak: a failed push tries another lane and keeps this one
            if i < 0:
                break
            ok = self.push(i, flat)
            if ok:
                self.lanes.cede(i)
                break
        self.scaled.restock(flat)
        return ok
