"""Ring of shared-memory slots between a front end and its workers."""
from __future__ import annotations

import weakref
from typing import Callable, Dict, List, Optional, Tuple


class ShmRing:
    def __init__(self, slots: int, nbytes: int) -> None:
        self.mem = [bytearray(nbytes) for _ in range(slots)]
        self.open_slots: List[int] = list(range(slots))
        self.generation = [0] * slots

    def lock_slot(self) -> Optional[int]:
        if self.open_slots:
            return self.open_slots.pop(0)  # clean: pool body, returned to the caller
        return None

    def lock_stamped(self) -> Tuple[Optional[int], int]:
        slot = self.lock_slot()  # clean: near miss, handed to the caller as the first part of the pair
        if slot is None:
            return None, 0
        self.generation[slot] += 1
        return slot, self.generation[slot]

    def lock_span(self, count: int) -> List[int]:
        span: List[int] = []
        while len(span) < count:
            slot = self.lock_slot()  # leak: a span that stays too short is answered by an empty list, its slots are gone
            if slot is None:
                return []
            span.append(slot)
        return span

    def unlock_slot(self, slot: int) -> None:
        self.open_slots.append(slot)

    def rotate(self, n: int) -> None:
        for _ in range(min(n, len(self.open_slots))):
            self.open_slots.append(self.open_slots.pop(0))  # clean: near miss, popped and appended in one statement


class WriteGuard:
    def __init__(self, ring: ShmRing) -> None:
        self.ring = ring
        self.slot: Optional[int] = None
        self.written = 0

    def __enter__(self) -> "WriteGuard":
        self.slot = self.ring.lock_slot()  # leak: __exit__ returns ahead of the unlock when nothing was written
        return self

    def write(self, data: bytes) -> None:
        if self.slot is not None:
            self.ring.mem[self.slot][: len(data)] = data
            self.written += len(data)

    def __exit__(self, *exc) -> None:
        if self.slot is None or self.written == 0:
            return
        self.ring.unlock_slot(self.slot)
        self.slot = None


class Reader:
    """Keeps one slot for its whole life."""

    def __init__(self, ring: ShmRing) -> None:
        self.slot = ring.lock_slot()  # clean: near miss, finalizer unlocks it when the reader goes away
        if self.slot is not None:
            weakref.finalize(self, ring.unlock_slot, self.slot)

    def peek(self, ring: ShmRing) -> bytes:
        return b"" if self.slot is None else bytes(ring.mem[self.slot])


class Channel:
    def __init__(self, ring: ShmRing, encode: Callable[[str], bytes]) -> None:
        self.ring = ring
        self.encode = encode
        self.by_worker: Dict[int, List[int]] = {}
        self.last: Optional[int] = None

    def post(self, kind: str, text: str) -> Optional[int]:
        slot = self.ring.lock_slot()  # leak: the default case returns with the slot locked
        if slot is None:
            return None
        match kind:
            case "text":
                data = self.encode(text)
            case "ping":
                self.ring.unlock_slot(slot)
                return 0
            case _:
                return None
        self.ring.mem[slot][: len(data)] = data
        self.ring.unlock_slot(slot)
        return len(data)

    def drain(self, texts: List[str]) -> int:
        done = 0
        while texts and (slot := self.ring.lock_slot()) is not None:  # clean: near miss, each slot of the walrus is unlocked at the end of the body
            data = self.encode(texts.pop())
            self.ring.mem[slot][: len(data)] = data
            done += len(data)
            self.ring.unlock_slot(slot)
        return done

    def probe(self, texts: List[str]) -> bool:
        while (slot := self.ring.lock_slot()) is not None and texts:  # leak: locked before texts is found empty, which ends the loop
            self.ring.mem[slot][:1] = self.encode(texts.pop())[:1]
            self.ring.unlock_slot(slot)
        return not texts

    def stamp(self, data: bytes) -> int:
        slot, gen = self.ring.lock_stamped()  # clean: both parts used, slot unlocked after the write
        if slot is None:
            return -1
        self.ring.mem[slot][: len(data)] = data
        self.ring.unlock_slot(slot)
        return gen

    def next_generation(self) -> int:
        _, gen = self.ring.lock_stamped()  # leak: the slot of the pair is thrown away
        return gen

    def assign(self, worker: int) -> bool:
        slot = self.ring.lock_slot()  # clean: appended to the worker's list, retire unlocks them all
        if slot is None:
            return False
        self.by_worker.setdefault(worker, []).append(slot)
        return True

    def assign_span(self, worker: int, count: int) -> bool:
        span = self.ring.lock_span(count)  # leak: replaces the list of a worker which still holds slots
        if not span:
            return False
        self.by_worker[worker] = span
        return True

    def retire(self, worker: int) -> None:
        for slot in self.by_worker.pop(worker, []):
            self.ring.unlock_slot(slot)

    def hold(self) -> Optional[int]:
        previous, self.last = self.last, self.ring.lock_slot()  # clean: near miss, the one before is unlocked after the swap
        if previous is not None:
            self.ring.unlock_slot(previous)
        return self.last

    def let_go(self) -> None:
        if self.last is not None:
            self.ring.unlock_slot(self.last)
            self.last = None
