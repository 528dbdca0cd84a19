"""Training loop for long documents."""
import logging
from typing import Callable, Dict, Iterable, List

import torch

from .attention import BlockAttention
from .pools import EventBox, RowPool, Rows

log = logging.getLogger(__name__)


class LongTrainer:
    def __init__(self, pool: RowPool, events: EventBox, attn: BlockAttention):
        self.pool = pool
        self.events = events
        self.attn = attn
        self.saved: Dict[int, List[Rows]] = {}

    def forward(self, doc: int, chunks: List[torch.Tensor], merge: Callable) -> bool:
        for c in chunks:
            kv = self.pool.fresh_copy(c)  # leak: a ring pass that fails returns before kv is in saved
            if kv is None:
                self.abort(doc)
                return False
            if not self.attn.run(c, kv, merge):
                self.abort(doc)
                return False
            self.saved.setdefault(doc, []).append(kv)
        return True

    def backward(self, doc: int, grad: Callable[[torch.Tensor], None]) -> None:
        for kv in reversed(self.saved.pop(doc, [])):
            grad(kv.t[: kv.valid])
            kv.decref()

    def abort(self, doc: int) -> None:
        for kv in self.saved.pop(doc, []):
            kv.decref()

    def step_all(self, docs: Iterable[int], side: torch.cuda.Stream, grad: Callable) -> int:
        n = 0
        ev = self.events.draw("step")  # leak: with no documents saved it is not put
        if ev is None:
            return 0
        if not self.saved:
            log.info("nothing to step")
            return 0
        for d in docs:
            self.backward(d, grad)
            n += 1
        ev.record(side)
        ev.synchronize()
        self.events.put(ev)
        return n
