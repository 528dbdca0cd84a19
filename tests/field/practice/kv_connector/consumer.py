from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional, Tuple

import torch

from .transport import PageArena


@dataclass
class Inbound:
    rid: str
    pages: List[int]
    done: bool = False
    layers: Dict[int, torch.Tensor] = field(default_factory=dict)


class KVConsumer:
    def __init__(self, arena: PageArena, workers: int = 2):
        self.arena = arena
        self.pool = ThreadPoolExecutor(workers)
        self.inbound: Dict[str, Inbound] = {}
        self.hooks: List[Callable[[], None]] = []

    def expect(self, rid: str, n: int) -> Optional[Inbound]:
        if rid in self.inbound:
            return self.inbound[rid]
        pages = self.arena.try_get_pages(n)  # clean: in the table, take_result() and cancel() put them back
        if pages is None:
            return None
        self.inbound[rid] = Inbound(rid, pages)
        return self.inbound[rid]

    def take_result(self, rid: str) -> torch.Tensor:
        ib = self.inbound.pop(rid)
        out = self.arena.data[ib.pages].clone()
        self.arena.put_pages(ib.pages)
        return out

    def cancel(self, rid: str) -> None:
        ib = self.inbound.pop(rid, None)
        if ib is not None:
            self.arena.put_pages(ib.pages)

    def receive_async(self, n: int, fn: Callable[[torch.Tensor], None]) -> Future:
        pages = self.arena.get_pages(n)  # clean: near miss, the closure puts them back when the task has run

        def task() -> None:
            try:
                fn(self.arena.data[pages])
            finally:
                self.arena.put_pages(pages)

        return self.pool.submit(task)

    def receive_hooked(self, n: int) -> torch.Tensor:
        pages = self.arena.get_pages(n)  # clean: near miss, a hook run by run_hooks() puts them back
        self.hooks.append(lambda: self.arena.put_pages(pages))
        return self.arena.data[pages]

    def run_hooks(self) -> None:
        while self.hooks:
            self.hooks.pop()()

    def receive_map(self, n: int, fn: Callable[[torch.Tensor], torch.Tensor]) -> Future:
        pages = self.arena.get_pages(n)  # leak: the closure reads them, nothing ever puts them back

        def task() -> torch.Tensor:
            return fn(self.arena.data[pages]).clone()

        return self.pool.submit(task)

    def receive_split(self, n: int, head: int) -> Tuple[torch.Tensor, torch.Tensor]:
        pages = self.arena.get_pages(n)  # clean: near miss, put back in two parts that make the whole
        a, b = pages[:head], pages[head:]
        ta = self.arena.data[a].clone()
        self.arena.put_pages(a)
        tb = self.arena.data[b].clone()
        self.arena.put_pages(b)
        return ta, tb

    def receive_head(self, n: int, head: int) -> torch.Tensor:
        pages = self.arena.get_pages(n)  # leak: the name is cut down to the head before put_pages
        pages = pages[:head]
        out = self.arena.data[pages].clone()
        self.arena.put_pages(pages)
        return out

    def receive_nonzero(self, n: int) -> torch.Tensor:
        pages = self.arena.get_pages(n)  # leak: only pages with content are put back
        full = [p for p in pages if bool(self.arena.data[p].any())]
        out = self.arena.data[full].clone()
        self.arena.put_pages(full)
        return out
