"""Send and receive sides of the transfer."""
from __future__ import annotations

import enum
from collections.abc import Callable

from .regions import Credits, RegionTable, deregister_layer, register_layer
from .session import CreditScope, RecvSession


class Status(enum.Enum):
    DONE = 0
    FLUSHED = 1
    REMOTE_ERROR = 2


Completion = Callable[[Status], None]


class Wire:
    def __init__(self) -> None:
        self.posted: list[tuple[int, Completion]] = []

    def post(self, rkey: int, on_done: Completion) -> None:
        self.posted.append((rkey, on_done))

    def poll(self, limit: int) -> int:
        """Run the completions of at most `limit` posted operations."""
        ran = 0
        while self.posted and ran < limit:
            rkey, on_done = self.posted.pop(0)
            on_done(self.probe(rkey))
            ran += 1
        return ran

    def probe(self, rkey: int) -> Status:
        return Status.DONE if rkey % 2 else Status.FLUSHED


class TransferEngine:
    def __init__(self, table: RegionTable, credits: Credits, wire: Wire) -> None:
        self.table = table
        self.credits = credits
        self.wire = wire
        self.errors = 0
        self.flushed = 0
        self.receiving: dict[str, RecvSession] = {}
        self.mirrors: dict[str, RecvSession] = {}

    def post_write(self, length: int) -> bool:
        region = self.table.register(length)  # leak: the completion deregisters on DONE alone
        if region is None:
            return False

        def on_done(status: Status) -> None:
            if status is Status.DONE:
                self.table.deregister(region)
            elif status is Status.FLUSHED:
                self.flushed += 1
            else:
                self.errors += 1

        self.wire.post(region.rkey, on_done)
        return True

    def post_read(self, length: int) -> bool:
        region = self.table.register(length)  # clean: near miss, the completion deregisters for every status
        if region is None:
            return False

        def on_done(status: Status) -> None:
            self.table.deregister(region)
            if status is Status.FLUSHED:
                self.flushed += 1
            elif status is Status.REMOTE_ERROR:
                self.errors += 1

        self.wire.post(region.rkey, on_done)
        return True

    def begin_recv(self, rid: str, length: int) -> None:
        self.receiving[rid] = RecvSession(self.table, length)  # leak: end_recv closes only complete sessions

    def end_recv(self, rid: str, complete: bool) -> bytes | None:
        session = self.receiving.pop(rid)
        if not complete:
            self.errors += 1
            return None
        data = session.pull(1 << 20)
        session.close()
        return data

    def begin_mirror(self, rid: str, length: int) -> None:
        self.mirrors[rid] = RecvSession(self.table, length)  # clean: near miss, end_mirror closes, then judges

    def end_mirror(self, rid: str, complete: bool) -> bytes | None:
        session = self.mirrors.pop(rid)
        data = session.pull(1 << 20)
        session.close()
        return data if complete else None

    def send_layers(self, lengths: list[int]) -> int:
        sent = 0
        for length in lengths:
            if not self.credits.consume():  # leak: one credit per layer, one replenished at the end
                break
            sent += length
        if sent:
            self.credits.replenish()
        return sent

    def send_burst(self, lengths: list[int]) -> int:
        sent = 0
        with CreditScope(self.credits, len(lengths)) as scope:  # clean: the scope replenishes what it was granted
            if not scope.granted:
                return 0
            sent = sum(lengths)
        return sent

    def send_metered(self, lengths: list[int]) -> int:
        sent = taken = 0
        for length in lengths:
            if not self.credits.consume():  # clean: near miss, counted in taken and replenished at once
                break
            taken += 1
            sent += length
        self.credits.replenish(taken)
        return sent

    def loopback(self, length: int) -> bool:
        layer = register_layer(self.table, length)  # leak: deregistered only where the probe is DONE
        if layer is None:
            return False
        ok = self.wire.probe(layer.keys.rkey) is Status.DONE
        if ok:
            deregister_layer(self.table, layer)
        return ok

    def loopback_checked(self, length: int) -> bool:
        layer = register_layer(self.table, length)  # clean: near miss, deregistered on both ways
        if layer is None:
            return False
        if self.wire.probe(layer.values.rkey) is not Status.DONE:
            self.errors += 1
            deregister_layer(self.table, layer)
            return False
        deregister_layer(self.table, layer)
        return True
