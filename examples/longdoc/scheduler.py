"""Which documents are worked on: admission, draft blocks, preemption."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .kv_blocks import KVBlockManager


@dataclass
class Request:
    """One document on its way. Its blocks are its own until `Scheduler.finish`."""

    request_id: int
    num_tokens: int
    blocks: list[int] = field(default_factory=list)
    draft_blocks: list[int] = field(default_factory=list)


class Scheduler:
    """First come, first served, as long as there are blocks."""

    def __init__(self, manager: KVBlockManager, draft_tokens: int = 32) -> None:
        self.manager = manager
        self.draft_tokens = draft_tokens
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    def step(self) -> list[Request]:
        """Admit what fits, in order."""
        admitted = []
        while self.waiting and self._admit(self.waiting[0]):
            admitted.append(self.waiting.popleft())
        return admitted

    def _admit(self, request: Request) -> bool:
        blocks = self.manager.alloc_blocks(self.manager.blocks_for(request.num_tokens))
        if blocks is None:
            return False
        request.blocks = blocks
        self.running[request.request_id] = request
        return True

    def grow(self, request: Request, num_tokens: int) -> bool:
        """More blocks for a document that turned out longer."""
        extra = self.manager.alloc_blocks(self.manager.blocks_for(num_tokens))
        if extra is None:
            return False
        request.blocks.extend(extra)
        request.num_tokens += num_tokens
        return True

    def fork(self, request: Request, request_id: int) -> Request | None:
        """A second reading of the same document, with blocks of its own and room for a draft."""
        blocks = self.manager.alloc_blocks(len(request.blocks))
        if blocks is None:
            return None
        draft = self.manager.alloc_blocks(self.manager.blocks_for(self.draft_tokens))
        if draft is None:
            return None
        twin = Request(request_id, request.num_tokens, blocks, draft)
        self.running[request_id] = twin
        return twin

    def follow(self, request: Request, request_id: int) -> Request:
        """Another question about the same document, on the same blocks."""
        twin = Request(request_id, request.num_tokens, self.manager.share_blocks(request.blocks))
        self.running[request_id] = twin
        return twin

    def swap_plan(self, request: Request) -> list[tuple[int, int]] | None:
        """Where each block of a preempted document would go; the places are only probed."""
        targets = self.manager.alloc_blocks(len(request.blocks))
        if targets is None:
            return None
        try:
            return list(zip(request.blocks, targets, strict=True))
        finally:
            self.manager.free_blocks(targets)

    def finish(self, request_id: int) -> None:
        request = self.running.pop(request_id)
        self.manager.free_blocks(request.blocks)
        self.manager.free_blocks(request.draft_blocks)
        request.blocks, request.draft_blocks = [], []

    def shutdown(self) -> None:
        for request_id in list(self.running):
            self.finish(request_id)
