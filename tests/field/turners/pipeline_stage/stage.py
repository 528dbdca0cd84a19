"""Forward/backward of one stage and the buffers that live between the two."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Deque, Dict, List, Optional

from .handles import Activation, ActivationPool, TicketOffice


@dataclass
class Microbatch:
    mb_id: int
    tokens: List[float]
    act: Optional[Activation] = None
    tag: Optional[int] = None
    is_dummy: bool = False


class PipelineStage:
    def __init__(self, pool: ActivationPool, tickets: TicketOffice, is_last: bool = False) -> None:
        self.pool = pool
        self.tickets = tickets
        self.is_last = is_last
        self.saved: Dict[int, Activation] = {}
        self.outbox: Deque[Microbatch] = deque()
        self.recv: Optional[Activation] = None

    def forward(self, mb: Microbatch) -> bool:
        act = self.pool.take()  # clean: saved under the microbatch, backward or flush restores it
        if act is None:
            return False
        act.payload = list(mb.tokens)
        previous = self.saved.pop(mb.mb_id, None)
        if previous is not None:
            self.pool.restore(previous)
        self.saved[mb.mb_id] = act
        return True

    def backward(self, mb_id: int) -> float:
        act = self.saved.pop(mb_id)
        loss = sum(act.payload)
        self.pool.restore(act)
        return loss

    def flush(self) -> None:
        for act in self.saved.values():
            self.pool.restore(act)
        self.saved.clear()

    def forward_only(self, mb: Microbatch) -> Optional[List[float]]:
        act = self.pool.take()  # leak: the last stage returns its logits before restore
        if act is None:
            return None
        act.payload = [t * 2 for t in mb.tokens]
        if self.is_last:
            return list(act.payload)
        result = list(act.payload)
        self.pool.restore(act)
        return result

    def queue_send(self, mb: Microbatch) -> bool:
        """The buffer and the tag ride in the microbatch until the peer acknowledges."""
        mb.act = self.pool.take()  # leak: drain skips the buffer of a dummy microbatch
        if mb.act is None:
            return False
        mb.tag = self.tickets.issue()  # clean: drain retires the tag of every microbatch
        self.outbox.append(mb)
        return True

    def drain(self) -> int:
        sent = 0
        while self.outbox:
            mb = self.outbox.popleft()
            self.tickets.retire(mb.tag)
            mb.tag = None
            if mb.is_dummy:
                continue
            self.pool.restore(mb.act)
            mb.act = None
            sent += 1
        return sent

    def post_recv(self) -> Optional[int]:
        tag = self.tickets.issue()  # leak: no buffer means None is returned and the tag is not retired
        act = self.pool.take()  # clean: complete_recv restores the field's buffer
        if act is None:
            return None
        if self.recv is not None:
            self.pool.restore(self.recv)
        self.recv = act
        return tag

    def complete_recv(self, tag: int) -> List[float]:
        act, self.recv = self.recv, None
        self.tickets.retire(tag)
        if act is None:
            return []
        payload = list(act.payload)
        self.pool.restore(act)
        return payload
