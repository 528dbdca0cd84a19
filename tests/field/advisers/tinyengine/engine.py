from __future__ import annotations

from typing import Any

from .request import Request
from .resources import BatchSlots, BlockAllocator
from .scheduler import Scheduler


class LLMEngine:
    def __init__(self, model: Any, num_blocks: int, max_num_seqs: int, block_size: int = 16) -> None:
        self.model = model
        self.blocks = BlockAllocator(num_blocks, block_size)
        self.slots = BatchSlots(max_num_seqs)
        self.scheduler = Scheduler(self.blocks, self.slots)
        self.system_blocks: list[int] = []

    def add_request(self, req: Request) -> None:
        self.scheduler.waiting.append(req)

    def set_system_prompt(self, tokens: list[int]) -> bool:
        blocks = self.blocks.allocate(self.blocks.blocks_for(len(tokens)))  # clean: near miss, the blocks of the former prompt are freed first
        if blocks is None:
            return False
        self.blocks.free(self.system_blocks)
        self.system_blocks = blocks
        return True

    def profile_run(self, num_tokens: int) -> int:
        largest = 0
        n = 1
        while n <= num_tokens:
            blocks = self.blocks.allocate(self.blocks.blocks_for(n))  # leak: the break when the model refuses the size leaves these blocks out
            if blocks is None:
                break
            if not self.model.can_run(blocks, n):
                break
            largest = n
            self.blocks.free(blocks)
            n *= 2
        return largest

    def dry_run(self, req: Request) -> bool:
        blocks = self.blocks.allocate(self.blocks.blocks_for(req.num_tokens))  # clean: near miss, freed on both branches
        if blocks is None:
            return False
        if self.model.can_run(blocks, req.num_tokens):
            self.blocks.free(blocks)
            return True
        self.blocks.free(blocks)
        return False

    def embed(self, tokens: list[int]) -> list[float]:
        blocks = self.blocks.allocate(self.blocks.blocks_for(len(tokens)))  # leak: only the first block is freed, the rest of the list is lost
        if blocks is None:
            return []
        vec = self.model.embed(tokens, blocks)
        self.blocks.free(blocks[:1])
        return vec

    def step(self) -> list[Request]:
        self.scheduler.admit()
        finished: list[Request] = []
        for req in list(self.scheduler.running):
            if req not in self.scheduler.running:
                continue
            if not self.scheduler.grow(req):  # clean: near miss, on False nothing was taken, the request is preempted
                self.scheduler.preempt(req)
                continue
            req.output.append(self.model.next_token(req.batch_slot, req.block_ids))
            if len(req.output) >= req.max_tokens:
                self.scheduler.finish(req)
                finished.append(req)
        return finished
