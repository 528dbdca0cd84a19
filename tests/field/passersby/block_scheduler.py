"""Continuous-batching scheduler with paged KV blocks."""
import collections
import enum
import logging
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional

log = logging.getLogger("engine.scheduler")


class Status(enum.Enum):
    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED = 3


@dataclass
class Request:
    request_id: str
    prompt_len: int
    max_new: int
    priority: int = 0
    generated: int = 0
    status: Status = Status.WAITING
    blocks: List[int] = field(default_factory=list)

    @property
    def total_len(self) -> int:
        return self.prompt_len + self.generated


class BlockManager:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free_ids: Deque[int] = collections.deque(range(num_blocks))

    def allocate_slots(self, n: int) -> Optional[List[int]]:
        """All or nothing; None when there are not enough blocks."""
        if n > len(self.free_ids):
            return None
        return [self.free_ids.popleft() for _ in range(n)]  # clean: the list goes to the caller

    def allocate_up_to(self, n: int) -> List[int]:
        got: List[int] = []
        while len(got) < n and self.free_ids:
            got.append(self.free_ids.popleft())  # clean: collected in the list that is returned
        return got

    def free_slots(self, ids: List[int]) -> None:
        self.free_ids.extend(ids)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


class Scheduler:
    def __init__(self, manager: BlockManager, max_running: int = 32, lookahead: int = 0) -> None:
        self.manager = manager
        self.max_running = max_running
        self.lookahead = lookahead
        self.waiting: Deque[Request] = collections.deque()
        self.running: Dict[str, Request] = {}

    def add(self, req: Request) -> None:
        self.waiting.append(req)

    def _admit(self) -> List[Request]:
        admitted = []
        while self.waiting and len(self.running) < self.max_running:
            req = self.waiting[0]
            need = self.manager.blocks_for(req.total_len)
            blocks = self.manager.allocate_slots(need)  # clean: near miss, None holds nothing; otherwise kept by the request, freed in finish
            if blocks is None:
                break
            self.waiting.popleft()
            req.blocks = blocks
            req.status = Status.RUNNING
            self.running[req.request_id] = req
            admitted.append(req)
        return admitted

    def _grow(self, req: Request) -> bool:
        need = self.manager.blocks_for(req.total_len + 1) - len(req.blocks)
        if need <= 0:
            return True
        extra = self.manager.allocate_slots(need)  # clean: joined to the blocks of the request
        if extra is None:
            return False
        req.blocks.extend(extra)
        return True

    def schedule_chunk(self, req: Request, tokens: int) -> int:
        """Takes whatever is there for a prefill chunk; returns tokens that fit."""
        need = self.manager.blocks_for(req.total_len + tokens) - len(req.blocks)
        got = self.manager.allocate_up_to(need)  # leak: a partial grant is reported as 0 but not freed
        if len(got) < need:
            log.debug("chunk of %s postponed: %d/%d blocks", req.request_id, len(got), need)
            return 0
        req.blocks += got
        return tokens

    def reserve_lookahead(self, req: Request) -> bool:
        got = self.manager.allocate_up_to(self.lookahead)  # clean: near miss, the partial grant is freed before the refusal
        if len(got) != self.lookahead:
            self.manager.free_slots(got)
            return False
        req.blocks.extend(got)
        return True

    def resume(self, req: Request) -> bool:
        """Bring a preempted request back in; its blocks are assigned anew."""
        blocks = self.manager.allocate_slots(self.manager.blocks_for(req.total_len))  # leak: at max_running the refusal drops the blocks
        if blocks is None:
            return False
        if len(self.running) >= self.max_running:
            return False
        req.blocks = blocks
        req.status = Status.RUNNING
        self.running[req.request_id] = req
        return True

    def swap_table(self, req: Request) -> bool:
        """Replace the table by a contiguous one after defragmentation."""
        fresh = self.manager.allocate_slots(len(req.blocks))  # clean: near miss, the old table is freed before it is replaced
        if fresh is None:
            return False
        old, req.blocks = req.blocks, fresh
        self.manager.free_slots(old)
        return True

    def preempt(self, req: Request) -> None:
        self.manager.free_slots(req.blocks)
        req.blocks = []
        req.status = Status.PREEMPTED
        self.running.pop(req.request_id, None)
        self.waiting.appendleft(req)

    def step(self) -> List[Request]:
        self._admit()
        for req in sorted(self.running.values(), key=lambda r: r.priority):
            if not self._grow(req):
                self.preempt(req)
        return list(self.running.values())

    def finish(self, request_id: str) -> None:
        req = self.running.pop(request_id, None)
        if req is None:
            return
        self.manager.free_slots(req.blocks)
        req.blocks = []
        req.status = Status.FINISHED

    def can_fit(self, tokens: int) -> bool:
        probe = self.manager.allocate_slots(self.manager.blocks_for(tokens))  # leak: the probe keeps what it was granted
        return probe is not None

    def warm(self, tokens: int) -> int:
        probe = self.manager.allocate_up_to(self.manager.blocks_for(tokens))  # clean: freed after counting
        count = len(probe)
        self.manager.free_slots(probe)
        return count * self.manager.block_size
