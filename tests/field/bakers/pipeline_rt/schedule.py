"""1F1B schedule over the stages held by this process."""
from __future__ import annotations

import logging
from typing import Any, List, Tuple

from .slots import ActivationSlot, SlotPool
from .stage import Stage, Stalled

log = logging.getLogger("pipeline.schedule")


class OneFOneB:
    def __init__(self, stages: List[Stage], pool: SlotPool) -> None:
        self.stages = stages
        self.pool = pool
        for a, b in zip(stages, stages[1:]):
            a.next = b
        self.aborted = 0

    def step(self, batches: List[Any]) -> List[int]:
        order: List[int] = []
        for micro, batch in enumerate(batches):
            if not self.stages[0].feed(micro, batch):  # clean: near miss, the slot travels in the inbox, backward or flush gives it back
                log.warning("no slot for microbatch %d", micro)
                break
            try:
                for stage in self.stages:
                    stage.forward_one()
            except Stalled:
                self.aborted += 1
                for stage in self.stages:
                    stage.flush()
                continue
            for stage in reversed(self.stages):
                stage.backward_one(micro)
            order.append(micro)
        return order

    def exchange(self, left: Any, right: Any) -> bool:
        try:
            with self.pool.temporary_pair() as (a, b):  # clean: near miss for the user, the manager itself loses the pair
                a.value, b.value = left / right, right / left
            return True
        except ZeroDivisionError:
            return False

    def bubble(self, probe: Any) -> float:
        with self.pool.temporary() as slot:  # clean: context manager
            if slot is None:
                return 1.0
            slot.value = probe
            return 1.0 / (1 + len(self.stages))

    def warmup(self, values: List[Any]) -> List[Tuple[int, ActivationSlot]]:
        """Slots filled ahead; finish_warmup takes them back."""
        filled: List[Tuple[int, ActivationSlot]] = []
        for i, value in enumerate(values):
            slot = self.pool.grab()  # clean: near miss, break only for None, returned in the list
            if slot is None:
                break
            slot.value = value
            filled.append((i, slot))
        return filled

    def finish_warmup(self, filled: List[Tuple[int, ActivationSlot]]) -> None:
        while filled:
            _, slot = filled.pop()
            self.pool.ungrab(slot)

    def dry_run(self, values: List[Any]) -> int:
        filled = self.warmup(values)  # clean: all taken back by finish_warmup
        n = len(filled)
        self.finish_warmup(filled)
        return n

    def enough_slots(self, values: List[Any]) -> bool:
        filled = self.warmup(values)  # leak: only the complete case takes the slots back
        if len(filled) == len(values):
            self.finish_warmup(filled)
            return True
        return False
