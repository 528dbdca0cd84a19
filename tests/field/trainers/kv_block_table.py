"""Paged K/V storage for long-context evaluation during training.

Pages are plain integers into one large cache tensor. The allocator hands out lists of
pages; a sequence keeps its list inside its `EvalRequest`.
"""
import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, Iterator, List, Optional

import torch


class PageAllocator:
    """Lowest page first, so that the high end of the cache stays contiguous."""

    def __init__(self, num_pages: int, page_size: int):
        self.page_size = page_size
        self._heap = list(range(num_pages))
        heapq.heapify(self._heap)

    def can_serve(self, n: int) -> bool:
        return len(self._heap) >= n

    def take(self, n: int) -> Optional[List[int]]:
        if len(self._heap) < n:
            return None
        return [heapq.heappop(self._heap) for _ in range(n)]  # clean: the list of pages is returned

    def put(self, pages: List[int]) -> None:
        for p in pages:
            heapq.heappush(self._heap, p)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)


@dataclass
class EvalRequest:
    rid: int
    tokens: torch.Tensor
    pages: List[int] = field(default_factory=list)
    done: int = 0
    aborted: bool = False

    @property
    def finished(self) -> bool:
        return self.aborted or self.done >= self.tokens.numel()


class EvalScheduler:
    def __init__(self, allocator: PageAllocator, chunk: int, max_running: int):
        self.allocator = allocator
        self.chunk = chunk
        self.max_running = max_running
        self.waiting: Deque[EvalRequest] = deque()
        self.running: Dict[int, EvalRequest] = {}

    def submit(self, req: EvalRequest) -> None:
        self.waiting.append(req)

    def _reserve(self, req: EvalRequest, tokens: int) -> bool:
        pages = self.allocator.take(self.allocator.pages_for(tokens))  # clean: near miss, either nothing was taken or it joins the request's pages
        if pages is None:
            return False
        req.pages.extend(pages)
        return True

    def admit(self) -> int:
        admitted = 0
        while self.waiting and len(self.running) < self.max_running:
            req = self.waiting[0]
            if not self._reserve(req, min(self.chunk, req.tokens.numel())):  # clean: near miss, a request with pages moves into running and retire() puts them back
                break
            self.waiting.popleft()
            self.running[req.rid] = req
            admitted += 1
        return admitted

    def admit_urgent(self, req: EvalRequest) -> bool:
        if not self._reserve(req, req.tokens.numel()):  # leak: when the batch is full the request is refused and its pages go with it
            return False
        if len(self.running) >= self.max_running:
            return False
        self.running[req.rid] = req
        return True

    def grow(self, req: EvalRequest) -> bool:
        have = len(req.pages) * self.allocator.page_size
        need = min(req.done + self.chunk, req.tokens.numel())
        if need <= have:
            return True
        extra = self.allocator.take(self.allocator.pages_for(need - have))  # clean: appended to the request or None
        if extra is None:
            return False
        req.pages += extra
        return True

    def retire(self, req: EvalRequest) -> None:
        self.running.pop(req.rid, None)
        self.allocator.put(req.pages)
        req.pages = []

    def preempt_last(self) -> Optional[EvalRequest]:
        if not self.running:
            return None
        rid = next(reversed(self.running))
        req = self.running[rid]
        self.retire(req)
        req.done = 0
        self.waiting.appendleft(req)
        return req

    def relocate(self, req: EvalRequest, cache: torch.Tensor) -> bool:
        """Move a sequence to lower pages to defragment the cache."""
        target = self.allocator.take(len(req.pages))  # leak: thrown away when the new pages are no lower than the old ones
        if target is None:
            return False
        if max(target) >= max(req.pages):
            return False
        cache[target] = cache[req.pages]
        self.allocator.put(req.pages)
        req.pages = target
        return True

    def compact(self, req: EvalRequest, cache: torch.Tensor) -> None:
        keep = self.allocator.pages_for(req.done)
        fresh = self.allocator.take(keep)  # leak: the request's old list is freed only beyond `keep`, the rest is overwritten
        if fresh is None:
            return
        cache[fresh] = cache[req.pages[:keep]]
        self.allocator.put(req.pages[keep:])
        req.pages = fresh

    def fork(self, req: EvalRequest, rid: int) -> Optional[EvalRequest]:
        child = EvalRequest(rid, req.tokens, done=req.done)
        child.pages = self.allocator.take(len(req.pages)) or []  # leak: with a finished parent the child is dropped together with its pages
        if req.finished or not child.pages:
            return None
        self.running[rid] = child
        return child

    def shutdown(self) -> None:
        for req in list(self.running.values()):
            self.retire(req)


def score_prefix(alloc: PageAllocator, cache: torch.Tensor, model, tokens: torch.Tensor) -> Optional[float]:
    pages = alloc.take(alloc.pages_for(tokens.numel()))  # clean: near miss, put back in the finally for both returns
    if pages is None:
        return None
    try:
        logits = model(tokens, cache, pages)
        if not torch.isfinite(logits).all():
            return None
        return -torch.log_softmax(logits[:-1], -1).gather(1, tokens[1:, None]).mean().item()
    finally:
        alloc.put(pages)


def windows(alloc: PageAllocator, tokens: torch.Tensor, span: int) -> Iterator[tuple]:
    """Yield (pages, window); the same pages serve every window."""
    pages = alloc.take(alloc.pages_for(span))  # leak: a trailing short window returns past the put
    if pages is None:
        return
    for start in range(0, tokens.numel(), span):
        window = tokens[start : start + span]
        if window.numel() < span:
            return
        yield pages, window
    alloc.put(pages)


def sliding_perplexity(alloc: PageAllocator, cache, model, tokens: torch.Tensor, span: int, stride: int) -> float:
    total, count = 0.0, 0
    for start in range(0, tokens.numel() - span, stride):
        pages = alloc.take(alloc.pages_for(span))  # clean: put back before the next window
        if pages is None:
            break
        window = tokens[start : start + span]
        lp = torch.log_softmax(model(window, cache, pages)[-stride:], -1)
        alloc.put(pages)
        if not torch.isfinite(lp).all():
            continue
        total -= lp.sum().item()
        count += stride
    return total / max(count, 1)
