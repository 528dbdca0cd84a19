"""Token streaming: pinned host pages behind generators and context managers."""
from __future__ import annotations

import contextlib
from typing import Dict, Iterator, List, Optional

import torch


class HostPagePool:
    def __init__(self, count: int, width: int):
        self.width = width
        self.spare: List[torch.Tensor] = [torch.zeros(width, dtype=torch.long) for _ in range(count)]

    def lease(self) -> torch.Tensor:
        if not self.spare:
            raise RuntimeError("out of host pages")
        return self.spare.pop()  # clean: lent to the caller

    def lease_pair(self) -> Optional[List[torch.Tensor]]:
        pair: List[torch.Tensor] = []
        while self.spare and len(pair) < 2:
            pair.append(self.spare.pop())  # leak: with one page left the pair is incomplete and dropped at return None
        if len(pair) < 2:
            return None
        return pair

    def unlease(self, page: torch.Tensor) -> None:
        self.spare.append(page)

    @contextlib.contextmanager
    def page(self) -> Iterator[torch.Tensor]:
        p = self.lease()  # clean: near miss, the finally behind the yield puts it back
        try:
            yield p
        finally:
            self.unlease(p)

    @contextlib.contextmanager
    def maybe_page(self, want: bool) -> Iterator[Optional[torch.Tensor]]:
        p = self.lease() if want else None  # clean: near miss, put back exactly where it is not None
        try:
            yield p
        finally:
            if p is not None:
                self.unlease(p)


class TokenStream:
    def __init__(self, pool: HostPagePool, eos: int):
        self.pool = pool
        self.eos = eos
        self.open_pages: Dict[str, torch.Tensor] = {}

    def iterate(self, steps: List[torch.Tensor]) -> Iterator[int]:
        """Yield token ids until EOS."""
        page = self.pool.lease()  # leak: the return at EOS skips unlease
        for step in steps:
            page[: step.numel()].copy_(step)
            tok = int(page[0])
            if tok == self.eos:
                return
            yield tok
        self.pool.unlease(page)

    def iterate_managed(self, steps: List[torch.Tensor]) -> Iterator[int]:
        with self.pool.page() as page:  # clean: near miss, return inside with leaves through the context manager
            for step in steps:
                page[: step.numel()].copy_(step)
                tok = int(page[0])
                if tok == self.eos:
                    return
                yield tok

    def batches(self, steps: List[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yields pages; the consumer unleases each of them."""
        for step in steps:
            page = self.pool.lease()  # clean: yielded, the consumer gives it back
            page[: step.numel()].copy_(step)
            yield page

    def drain(self, steps: List[torch.Tensor]) -> List[int]:
        out: List[int] = []
        for page in self.batches(steps):  # clean: each page is unleased in the body
            out.append(int(page[0]))
            self.pool.unlease(page)
        return out

    def drain_nonzero(self, steps: List[torch.Tensor]) -> List[int]:
        out: List[int] = []
        for page in self.batches(steps):  # leak: continue for padding leaves that page leased
            tok = int(page[0])
            if tok == 0:
                continue
            out.append(tok)
            self.pool.unlease(page)
        return out

    def detokenize(self, step: torch.Tensor, fast: bool) -> List[int]:
        with self.pool.maybe_page(not fast) as page:  # clean: the context manager puts back what it leased
            if page is None:
                return step.tolist()
            page[: step.numel()].copy_(step)
            return page[: step.numel()].tolist()

    def begin(self, rid: str) -> None:
        stale = self.open_pages.pop(rid, None)
        if stale is not None:
            self.pool.unlease(stale)
        self.open_pages[rid] = self.pool.lease()  # clean: near miss, a stale page went back first; finish unleases this one

    def flush(self, rid: str, tokens: torch.Tensor) -> List[int]:
        page = self.open_pages[rid]
        page[: tokens.numel()].copy_(tokens)
        return page[: tokens.numel()].tolist()

    def compare(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        pair = self.pool.lease_pair()  # leak: unequal sizes return before the pages go back
        if pair is None:
            return torch.equal(a, b)
        left, right = pair
        if a.numel() != b.numel():
            return False
        left[: a.numel()].copy_(a)
        right[: b.numel()].copy_(b)
        same = torch.equal(left[: a.numel()], right[: b.numel()])
        for p in pair:
            self.pool.unlease(p)
        return same

    def finish(self, rid: str) -> None:
        page = self.open_pages.pop(rid, None)
        if page is not None:
            self.pool.unlease(page)


def count_eos(stream: TokenStream, pool: HostPagePool, steps: List[torch.Tensor]) -> int:
    scratch = pool.lease()  # leak: an empty step returns the count before unlease
    n = 0
    for step in steps:
        if step.numel() == 0:
            return n
        scratch[: step.numel()].copy_(step)
        if stream.eos in scratch[: step.numel()].tolist():
            n += 1
    pool.unlease(scratch)
    return n
