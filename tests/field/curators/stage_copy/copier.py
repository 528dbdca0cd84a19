from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Any, Callable, Deque, List, Optional

import torch

from .pools import EventPool, StreamLanes
from .staging import StagingLease, StagingPool

logger = logging.getLogger(__name__)


@dataclass
class CopyTicket:
    name: str
    block: int
    lane: int
    event: Any
    dst: torch.Tensor


class AsyncCopier:
    def __init__(self, staging: StagingPool, lanes: StreamLanes, events: EventPool) -> None:
        self.staging = staging
        self.lanes = lanes
        self.events = events
        self.inflight: Deque[CopyTicket] = deque()
        self.fence: Optional[Any] = None

    def submit(self, name: str, data: torch.Tensor, dst: torch.Tensor, urgent: bool = False) -> bool:
        block = self.staging.grab(name)  # clean: near miss, dropped when there is no lane, else in the ticket
        if block is None:
            return False
        lane = self.lanes.enter(urgent)  # clean: near miss, in the ticket, retire leaves it
        if lane is None:
            self.staging.drop(block)
            return False
        event = self.events.obtain()  # leak: retire recycles events of urgent lanes only
        self.staging.tensor(block)[: data.numel()].copy_(data)
        dst.copy_(self.staging.tensor(block)[: dst.numel()])
        self.inflight.append(CopyTicket(name, block, lane, event, dst))
        return True

    def retire(self, limit: Optional[int] = None) -> int:
        count = 0
        while self.inflight and (limit is None or count < limit):
            ticket = self.inflight.popleft()
            ticket.event.synchronize()
            self.staging.drop(ticket.block)
            self.lanes.leave(ticket.lane)
            if ticket.lane < self.lanes.high:
                self.events.recycle(ticket.event)
            count += 1
        return count

    def set_fence(self) -> None:
        if self.fence is not None:
            self.events.recycle(self.fence)
        self.fence = self.events.obtain()  # clean: near miss, the one before was recycled and close recycles the last

    def broadcast(self, data: torch.Tensor, dsts: List[torch.Tensor]) -> bool:
        lanes = self.lanes.enter_set(len(dsts))  # leak: without a staging block it returns False with all lanes entered
        if not lanes:
            return False
        block = self.staging.grab("broadcast")  # clean: dropped at the end of the copy
        if block is None:
            return False
        self.staging.tensor(block)[: data.numel()].copy_(data)
        for lane, dst in zip(lanes, dsts):
            dst.copy_(self.staging.tensor(block)[: dst.numel()])
            self.lanes.leave(lane)
        self.staging.drop(block)
        return True

    def write_through(self, name: str, data: torch.Tensor, sink: Callable[[torch.Tensor], None]) -> bool:
        with StagingLease(self.staging, name) as lease:  # clean: near miss, without spare the exit drops the only block on every way
            if lease.main is None:
                return False
            view = self.staging.tensor(lease.main)[: data.numel()]
            view.copy_(data)
            sink(view)
            return True
        return False

    def double_buffered(self, name: str, chunks: List[torch.Tensor], sink: Callable[[torch.Tensor], None]) -> int:
        written = 0
        with StagingLease(self.staging, name, spare=True) as lease:  # leak: a sink that would block is swallowed and the spare block stays grabbed
            if lease.main is None or lease.extra is None:
                return 0
            for i, chunk in enumerate(chunks):
                view = self.staging.tensor(lease.main if i % 2 == 0 else lease.extra)[: chunk.numel()]
                view.copy_(chunk)
                sink(view)
                written += 1
        return written

    def time_copy(self, data: torch.Tensor, rounds: int) -> List[float]:
        begin, end = self.events.obtain(), self.events.obtain()  # clean: near miss, both recycled also when rounds is zero
        times: List[float] = []
        for _ in range(rounds):
            begin.record()
            data.clone()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        for event in (begin, end):
            self.events.recycle(event)
        return times

    def idle_lane(self) -> bool:
        lane = self.lanes.enter()  # leak: only tells whether a lane is there and keeps it
        return lane is not None

    def close(self) -> None:
        self.retire()
        if self.fence is not None:
            self.events.recycle(self.fence)
            self.fence = None
