"""Thin layer over the transfer library: one handle per posted transfer."""
from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass, field

from .regions import Region


class State(enum.Enum):
    POSTED = 0
    DONE = 1
    ERROR = 2


@dataclass
class Xfer:
    xid: int
    regions: list[Region]
    state: State = State.POSTED
    polls: int = 0


class AgentError(Exception):
    pass


@dataclass
class TransferAgent:
    max_handles: int = 64
    live: dict[int, Xfer] = field(default_factory=dict)
    faulty: set[int] = field(default_factory=set)
    _ids: itertools.count = field(default_factory=itertools.count)

    def make_xfer(self, regions: list[Region]) -> Xfer:
        if len(self.live) >= self.max_handles:
            raise AgentError("out of handles")
        xfer = Xfer(next(self._ids), regions)
        self.live[xfer.xid] = xfer
        return xfer

    def release_xfer(self, xfer: Xfer) -> None:
        del self.live[xfer.xid]

    def check(self, xfer: Xfer) -> State:
        xfer.polls += 1
        if any(r.rkey in self.faulty for r in xfer.regions):
            xfer.state = State.ERROR
        elif xfer.polls > 1:
            xfer.state = State.DONE
        return xfer.state

    def post_with_retry(self, regions: list[Region], attempts: int = 3) -> Xfer | None:
        for _ in range(attempts):
            xfer = self.make_xfer(regions)  # leak: a failed attempt is retried with a new handle, the old one stays live
            if self.check(xfer) is not State.ERROR:
                return xfer
        return None

    def post_or_wait(self, regions: list[Region], attempts: int = 3) -> Xfer | None:
        for _ in range(attempts):
            try:
                xfer = self.make_xfer(regions)  # clean: near miss, released before each new attempt
            except AgentError:
                continue
            if self.check(xfer) is State.ERROR:
                self.release_xfer(xfer)
                continue
            return xfer
        return None
