"""One stage of the pipeline and the messages it passes on."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Any, Callable, Deque, Dict, List, Optional

from .slots import ActivationSlot, SlotPool

log = logging.getLogger("pipeline.stage")


@dataclass
class Message:
    micro: int
    slot: ActivationSlot


class Stalled(RuntimeError):
    pass


class Stage:
    def __init__(self, rank: int, pool: SlotPool, fn: Callable[[Any], Any]) -> None:
        self.rank = rank
        self.pool = pool
        self.fn = fn
        self.inbox: Deque[Message] = deque()
        self.next: Optional["Stage"] = None
        self._held: Dict[int, ActivationSlot] = {}
        self._replayed: Dict[int, ActivationSlot] = {}
        self.last_loss: Optional[float] = None

    def feed(self, micro: int, value: Any) -> bool:
        slot = self.pool.grab()  # clean: None-checked, goes into the inbox with the message
        if slot is None:
            return False
        slot.value = value
        self.inbox.append(Message(micro, slot))
        return True

    def feed_valid(self, micro: int, value: Any) -> bool:
        slot = self.pool.grab()  # leak: an empty microbatch is dropped with its slot
        if slot is None:
            return False
        if not value:
            log.info("microbatch %d is empty", micro)
            return True
        slot.value = value
        self.inbox.append(Message(micro, slot))
        return True

    def forward_one(self) -> Optional[int]:
        """Takes one message, keeps its slot for backward and passes a result on."""
        if not self.inbox:
            return None
        msg = self.inbox.popleft()
        out = self.fn(msg.slot.value)
        self._held[msg.micro] = msg.slot
        if self.next is None:
            self.last_loss = float(out)
        elif not self.next.feed(msg.micro, out):  # clean: near miss, a refused feed holds nothing, else the slot is in the next inbox
            raise Stalled(f"stage {self.rank + 1} has no slot")
        return msg.micro

    def backward_one(self, micro: int) -> Any:
        slot = self._held.pop(micro)
        try:
            return slot.value
        finally:
            self.pool.ungrab(slot)

    def flush(self) -> int:
        dropped = 0
        while self.inbox:
            self.pool.ungrab(self.inbox.popleft().slot)
            dropped += 1
        for micro in list(self._held):
            self.pool.ungrab(self._held.pop(micro))
            dropped += 1
        return dropped

    def recompute(self, micro: int) -> bool:
        fresh = self.pool.grab()  # clean: near miss, exchanged for the held slot, which is given back
        if fresh is None:
            return False
        old = self._held.get(micro)
        if old is None:
            self.pool.ungrab(fresh)
            return False
        fresh.value = self.fn(old.value)
        self._held[micro] = fresh
        self.pool.ungrab(old)
        return True

    def stash(self, micro: int, value: Any) -> bool:
        slot = self.pool.grab()  # leak: the second attempt replaces the first one's slot in the table
        if slot is None:
            return False
        slot.value = value
        self._replayed[micro] = slot
        return True

    def replay(self, micros: List[int], values: List[Any]) -> int:
        """Runs microbatches again after a loss spike, twice each."""
        again = 0
        for micro, value in zip(micros, values):
            for attempt in range(2):
                if self.stash(micro, (attempt, value)):  # clean: near miss, the stage's table has taken the slot over
                    again += 1
        for micro in micros:
            slot = self._replayed.pop(micro, None)
            if slot is not None:
                self.pool.ungrab(slot)
        return again
