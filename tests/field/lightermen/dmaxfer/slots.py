"""Descriptor slots of one DMA channel."""
import threading
from dataclasses import dataclass
from typing import Callable, List, Optional

NO_SLOT = -1


@dataclass
class Descriptor:
    src: int
    dst: int
    length: int
    chained: bool = False
    on_done: Optional[Callable[[int], None]] = None


class SlotTable:
    """claim() answers a slot number or NO_SLOT; surrender() makes the slot free."""

    def __init__(self, slots: int) -> None:
        self._mutex = threading.Lock()
        self._bitmap = [False] * slots
        self._desc: List[Optional[Descriptor]] = [None] * slots
        self._hint = 0

    def claim(self) -> int:
        with self._mutex:
            n = len(self._bitmap)
            for k in range(n):
                slot = (self._hint + k) % n
                if not self._bitmap[slot]:
                    self._bitmap[slot] = True
                    self._hint = slot + 1
                    return slot
        return NO_SLOT

    def surrender(self, slot: int) -> None:
        with self._mutex:
            self._bitmap[slot] = False
            self._desc[slot] = None

    def program(self, slot: int, desc: Descriptor) -> None:
        self._desc[slot] = desc

    def descriptor(self, slot: int) -> Optional[Descriptor]:
        return self._desc[slot]

    def claim_run(self, count: int) -> List[int]:
        """Several slots or none (an empty list)."""
        got: List[int] = []
        for _ in range(count):
            slot = self.claim()  # clean: on a shortage all are surrendered, else handed to the caller
            if slot == NO_SLOT:
                for s in got:
                    self.surrender(s)
                return []
            got.append(slot)
        return got

    def claim_adjacent(self, count: int) -> List[int]:
        """Slots with consecutive numbers, for engines without chaining, or an empty list."""
        run: List[int] = []
        while len(run) < count:
            slot = self.claim()  # leak: a gap restarts the run and the slots before the gap are dropped
            if slot == NO_SLOT:
                for s in run:
                    self.surrender(s)
                return []
            if run and slot != run[-1] + 1:
                run = []
            run.append(slot)
        return run
