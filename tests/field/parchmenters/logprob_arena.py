"""Reference log-prob recompute: extents of one activation arena, masks shared by length."""
from __future__ import annotations

import bisect
import queue
import threading
from concurrent.futures import Executor, Future
from typing import Callable, Iterable, Iterator, NamedTuple, Optional

import torch


class Extent(NamedTuple):
    start: int
    size: int


class ExtentBook:
    """First fit over sorted gaps, neighbours are joined when an extent comes back."""

    def __init__(self, size: int):
        self._gaps: list[Extent] = [Extent(0, size)]
        self._mu = threading.Lock()

    def book(self, n: int) -> Optional[Extent]:
        with self._mu:
            for i, gap in enumerate(self._gaps):
                if gap.size >= n:
                    start, size = self._gaps.pop(i)  # clean: near miss, what is not handed out is inserted again
                    if size > n:
                        self._gaps.insert(i, Extent(start + n, size - n))
                    return Extent(start, n)
            return None

    def book_aligned(self, n: int, align: int) -> Optional[Extent]:
        with self._mu:
            i = 0
            while i < len(self._gaps):
                if self._gaps[i].size < n:
                    i += 1
                    continue
                start, size = self._gaps.pop(i)  # leak: a gap too short once it is aligned is not inserted again
                pad = -start % align
                if size - pad < n:
                    continue
                rest = [Extent(start, pad), Extent(start + pad + n, size - pad - n)]
                self._gaps[i:i] = [g for g in rest if g.size]
                return Extent(start + pad, n)
            return None

    def unbook(self, ext: Extent) -> None:
        with self._mu:
            i = bisect.bisect_left(self._gaps, ext)
            start, end = ext.start, ext.start + ext.size
            if i < len(self._gaps) and self._gaps[i].start == end:
                end += self._gaps[i].size
                del self._gaps[i]
            if i and sum(self._gaps[i - 1]) == start:
                i -= 1
                start = self._gaps[i].start
                del self._gaps[i]
            self._gaps.insert(i, Extent(start, end - start))


class MaskBank:
    """Causal masks by length; a mask nobody holds is freed."""

    def __init__(self):
        self._masks: dict[int, list] = {}

    def hold(self, n: int) -> torch.Tensor:
        entry = self._masks.get(n)
        if entry is None:
            entry = self._masks[n] = [torch.ones(n, n).tril_().bool(), 0]
        entry[1] += 1
        return entry[0]

    def unhold(self, n: int) -> None:
        entry = self._masks[n]
        entry[1] -= 1
        if entry[1] == 0:
            del self._masks[n]


class ScoreFrame:
    """Work space of one forward pass."""

    def __init__(self, book: ExtentBook, arena: torch.Tensor, n: int):
        self._book, self._arena, self._n = book, arena, n
        self._ext: Optional[Extent] = None
        self.result: Optional[torch.Tensor] = None

    def __enter__(self) -> "ScoreFrame":
        self._ext = self._book.book(self._n)  # leak: __exit__ returns before unbook() when no result was set
        if self._ext is None:
            raise MemoryError(f"{self._n} floats")
        return self

    @property
    def view(self) -> torch.Tensor:
        return self._arena[self._ext.start:self._ext.start + self._ext.size]

    def __exit__(self, *exc) -> None:
        if self.result is None:
            return
        self.result = self.result.clone()
        self._book.unbook(self._ext)


class Job:
    def __init__(self, uid: str, tokens: torch.Tensor, ext: Extent):
        self.uid = uid
        self.tokens = tokens
        self.ext = ext
        self.cancelled = False


class LogprobWorker:
    def __init__(self, book: ExtentBook, arena: torch.Tensor, masks: MaskBank, width: int, forward: Callable):
        self.book = book
        self.arena = arena
        self.masks = masks
        self.width = width
        self.forward = forward
        self.jobs: "queue.Queue[Job | None]" = queue.Queue()
        self.urgent: "queue.Queue[Job | None]" = queue.Queue()

    def _at(self, ext: Extent) -> torch.Tensor:
        return self.arena[ext.start:ext.start + ext.size]

    def score(self, tokens: torch.Tensor) -> Optional[torch.Tensor]:
        with ScoreFrame(self.book, self.arena, tokens.numel() * self.width) as frame:  # leak: tokens of a wrong dtype leave without a result, so the frame keeps its extent
            if tokens.dtype != torch.int64:
                return None
            frame.result = self.forward(tokens, frame.view)
        return frame.result

    def submit(self, uid: str, tokens: torch.Tensor) -> Optional[Job]:
        ext = self.book.book(tokens.numel() * self.width)  # leak: drain() skips cancelled jobs and their extents
        if ext is None:
            return None
        job = Job(uid, tokens, ext)
        self.jobs.put(job)
        return job

    def drain(self, out: dict) -> None:
        while True:
            job = self.jobs.get()
            if job is None:
                return
            if job.cancelled:
                continue
            out[job.uid] = self.forward(job.tokens, self._at(job.ext)).clone()
            self.book.unbook(job.ext)

    def submit_urgent(self, uid: str, tokens: torch.Tensor) -> Optional[Job]:
        ext = self.book.book(tokens.numel() * self.width)  # clean: near miss, drain_urgent() unbooks every job, cancelled or not
        if ext is None:
            return None
        job = Job(uid, tokens, ext)
        self.urgent.put(job)
        return job

    def drain_urgent(self, out: dict) -> None:
        while (job := self.urgent.get()) is not None:
            try:
                if job.cancelled:
                    continue
                out[job.uid] = self.forward(job.tokens, self._at(job.ext)).clone()
            finally:
                self.book.unbook(job.ext)

    def score_async(self, pool: Executor, tokens: torch.Tensor) -> Optional[Future]:
        ext = self.book.book(tokens.numel() * self.width)  # clean: near miss, the future's callback unbooks it, cancelled or not
        if ext is None:
            return None
        fut = pool.submit(self.forward, tokens, self._at(ext))
        fut.add_done_callback(lambda _f: self.book.unbook(ext))
        return fut

    def score_masked(self, tokens: torch.Tensor, limit: int) -> Optional[torch.Tensor]:
        n = tokens.numel()
        mask = self.masks.hold(n)  # leak: still held after the return for long inputs
        if n > limit:
            return None
        out = self.forward(tokens, mask)
        self.masks.unhold(n)
        return out

    def score_masked_many(self, batch: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        out = []
        for tokens in batch:
            mask = self.masks.hold(tokens.numel())  # clean: unheld in finally
            try:
                out.append(self.forward(tokens, mask))
            finally:
                self.masks.unhold(tokens.numel())
        return out

    def windows(self, tokens: torch.Tensor, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        ext = self.book.book(size * self.width)  # clean: near miss, unbooked in finally when a consumer breaks off
        if ext is None:
            return
        try:
            for chunk in tokens.split(size):
                yield chunk, self._at(ext)
        finally:
            self.book.unbook(ext)

    def first_bad(self, tokens: torch.Tensor, size: int, floor: float) -> int:
        for i, (chunk, space) in enumerate(self.windows(tokens, size)):  # clean: the generator's finally runs at the break
            if self.forward(chunk, space).min() < floor:
                return i * size
        return -1
