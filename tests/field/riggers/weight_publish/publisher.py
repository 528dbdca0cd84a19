"""Publisher of the trainer and the subscriptions of rollout engines."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Optional

from .slabs import Slab, SlabDepot
from .versions import Version, VersionStore

Send = Callable[[int, memoryview], bool]


@dataclass
class Subscription:
    engine: int
    current: Optional[Version] = None
    pending: Optional[Version] = None
    unacked: dict[int, Slab] = field(default_factory=dict)


class Publisher:
    def __init__(self, store: VersionStore, depot: SlabDepot, send: Send):
        self.store = store
        self.depot = depot
        self.send = send
        self.subs: dict[int, Subscription] = {}
        self.seq = 0
        self.canary: Optional[Version] = None
        self.replaced: list[int] = []

    # -- subscriptions -------------------------------------------------------------------------------------
    def subscribe(self, engine: int) -> bool:
        if engine in self.subs:
            return False
        v = self.store.pin_latest()  # clean: in Subscription.current, promote and unsubscribe unpin it
        self.subs[engine] = Subscription(engine, current=v)
        return v is not None

    def offer(self, engine: int) -> int:
        """Pins the newest version for an engine that is still busy with the current one."""
        sub = self.subs[engine]
        if sub.pending is not None:
            self.store.unpin(sub.pending)
        sub.pending = self.store.pin_latest()  # leak: unsubscribe unpins current but not pending
        return sub.pending.number if sub.pending else -1

    def promote(self, engine: int) -> None:
        sub = self.subs[engine]
        if sub.pending is None:
            return
        if sub.current is not None:
            self.store.unpin(sub.current)
        sub.current, sub.pending = sub.pending, None

    def unsubscribe(self, engine: int) -> None:
        sub = self.subs.pop(engine, None)
        if sub is None:
            return
        if sub.current is not None:
            self.store.unpin(sub.current)
        for slab in sub.unacked.values():
            self.depot.put_down(slab)

    # -- sending -------------------------------------------------------------------------------------------
    def push(self, engine: int, number: int) -> int:
        sent = 0
        with self.store.reading(number) as v:  # clean: the context manager unpins
            if v is None:
                return 0
            for t in v.weights.values():
                for slab in self.depot.chunks(t):  # clean: near miss, the generator puts each down
                    self.send(engine, slab.mem[: slab.fill].numpy().data)
                    sent += slab.fill
        return sent

    def push_reliable(self, engine: int, number: int) -> int:
        """Slabs stay with the subscription until the engine acknowledges them."""
        sub = self.subs[engine]
        with self.store.reading(number) as v:  # clean: the context manager unpins
            if v is None:
                return 0
            for t in v.weights.values():
                for slab in self.depot.chunks_owned(t):  # clean: in unacked, ack or unsubscribe put it down
                    self.seq += 1
                    slab.seq = self.seq
                    sub.unacked[slab.seq] = slab
                    self.send(engine, slab.mem[: slab.fill].numpy().data)
        return len(sub.unacked)

    def ack(self, engine: int, upto: int) -> None:
        sub = self.subs[engine]
        for seq in [s for s in sub.unacked if s <= upto]:
            self.depot.put_down(sub.unacked.pop(seq))

    def push_tensor(self, engine: int, v: Version, name: str) -> int:
        sent = 0
        for slab in self.depot.chunks_owned(v.weights[name]):  # leak: the one whose send fails breaks out
            if not self.send(engine, slab.mem[: slab.fill].numpy().data):
                break
            sent += slab.fill
            self.depot.put_down(slab)
        return sent

    # -- checks --------------------------------------------------------------------------------------------
    def set_canary(self, number: int) -> bool:
        v = self.store.pin(number)  # leak: a canary that is replaced stays pinned
        if v is None:
            return False
        if self.canary is not None:
            self.replaced.append(self.canary.number)
        self.canary = v
        return True

    def clear_canary(self) -> None:
        if self.canary is not None:
            self.store.unpin(self.canary)
            self.canary = None

    def newest_common(self, engines: list[int], numbers: list[int]) -> Optional[int]:
        for n in sorted(numbers, reverse=True):
            v = self.store.pin(n)  # leak: pinned again in every round that does not match
            if v is None:
                continue
            if all(self.subs[e].current is v for e in engines):
                self.store.unpin(v)
                return n
        return None
