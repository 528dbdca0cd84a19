from __future__ import annotations

import threading
from typing import Callable, Optional

from .blocks import BlockAllocator, SwapSpace
from .scheduler import SampleSlots, Scheduler, SeqState


class StepGate:
    def __init__(self) -> None:
        self._lock = threading.Lock()

    def enter(self) -> bool:
        return self._lock.acquire(timeout=1.0)

    def leave(self) -> None:
        self._lock.release()


class Engine:
    def __init__(self, num_blocks: int, swap_slots: int, block_size: int) -> None:
        self.gpu = BlockAllocator(num_blocks)
        self.swap = SwapSpace(swap_slots)
        self.slots = SampleSlots(num_blocks)
        self.scheduler = Scheduler(self.gpu, self.swap, self.slots, block_size)
        self.gate = StepGate()
        self.reserved: list[int] = []
        self.grammar_slots: dict[str, int] = {}

    def add_request(self, rid: str, prompt_len: int, max_tokens: int) -> None:
        self.scheduler.waiting.append(SeqState(rid, prompt_len, max_tokens))

    def step(self) -> int:
        if not self.gate.enter():  # leak: an idle step returns before the gate is left
            return 0
        batch = self.scheduler.schedule()
        if not batch:
            return 0
        for seq in batch:
            seq.generated += 1
            if seq.generated >= seq.max_tokens:
                self.scheduler.finish(seq)
        self.gate.leave()
        return len(batch)

    def abort(self, rid: str) -> bool:
        if not self.gate.enter():  # clean: near miss, refused is not held, and the return stands inside try with a finally
            return False
        try:
            return self.scheduler.abort(rid)
        finally:
            self.gate.leave()

    def reserve_headroom(self, n: int) -> bool:
        self.gpu.release_all(self.reserved)
        blocks = self.gpu.allocate_n(n)  # clean: near miss, the former reserve was released first and this one stays in the field
        if blocks is None:
            return False
        self.reserved = blocks
        return True

    def profile_run(self, n: int, forward: Callable[[list[int]], bool]) -> int:
        blocks = self.gpu.allocate_n(n)  # leak: a forward pass that reports failure returns 0 before the release; it only ever saw a copy of the list
        if blocks is None:
            return 0
        if not forward(list(blocks)):
            return 0
        self.gpu.release_all(blocks)
        return n

    def warm_swap(self, rounds: int, n: int) -> int:
        warmed = 0
        for _ in range(rounds):
            slots = self.swap.reserve(n)  # leak: only every other round releases its slots, the rounds between drop theirs
            if not slots:
                break
            warmed += len(slots)
            if warmed % (2 * n) == 0:
                self.swap.release(slots)
        return warmed

    def start_grammar(self, rid: str) -> Optional[int]:
        slot = self.slots.take_slot()  # leak: started twice, a request's second slot replaces the first in the table
        if slot is None:
            return None
        self.grammar_slots[rid] = slot
        return slot

    def end_grammar(self, rid: str) -> None:
        slot = self.grammar_slots.pop(rid, None)
        if slot is not None:
            self.slots.put_slot(slot)
