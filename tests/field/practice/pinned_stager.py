from __future__ import annotations

import contextlib
import queue
import threading
import typing as t

import torch

__all__ = ["PinnedArena", "Stager", "BackgroundStager"]


class PinnedArena:
    """Page-locked host memory, carved into equal pages which are lent by id."""

    def __init__(self, pages: int, page_bytes: int) -> None:
        self._mem = torch.empty(pages, page_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        self._q: queue.SimpleQueue[int] = queue.SimpleQueue()
        for i in range(pages):
            self._q.put(i)

    def pin(self, block: bool = True) -> int | None:
        try:
            return self._q.get(block)
        except queue.Empty:
            return None

    def unpin(self, page: int) -> None:
        self._q.put(page)

    def __getitem__(self, page: int) -> torch.Tensor:
        return self._mem[page]

    @contextlib.contextmanager
    def pinned(self) -> t.Iterator[torch.Tensor]:
        page = self.pin()  # clean: finally
        try:
            yield self._mem[page]
        finally:
            self.unpin(page)


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8).flatten()


class Stager:
    def __init__(self, arena: PinnedArena, stream: t.Any = None) -> None:
        self.arena = arena
        self.stream = stream
        self._events: list[tuple[torch.cuda.Event, int]] = []

    def upload(self, x: torch.Tensor) -> torch.Tensor:
        raw = _as_bytes(x)
        page = self.arena.pin()  # clean: queued with its event, reap() unpins
        host = self.arena[page][: raw.numel()]
        host.copy_(raw)
        dev = host.to("cuda", non_blocking=True)
        ev = torch.cuda.Event()
        ev.record(self.stream)
        self._events.append((ev, page))
        return dev

    def reap(self, wait: bool = False) -> None:
        left = []
        for ev, page in self._events:
            if wait:
                ev.synchronize()
            if wait or ev.query():
                self.arena.unpin(page)
            else:
                left.append((ev, page))
        self._events = left

    def upload_sync(self, x: torch.Tensor) -> torch.Tensor:
        with self.arena.pinned() as host:  # clean: with block
            raw = _as_bytes(x)
            host[: raw.numel()].copy_(raw)
            return host[: raw.numel()].to("cuda")

    def try_upload(self, x: torch.Tensor) -> torch.Tensor | None:
        page = self.arena.pin(block=False)  # leak: inputs larger than a page return None and keep it
        if page is None:
            return None
        raw = _as_bytes(x)
        if raw.numel() > self.arena[page].numel():
            return None
        self.arena[page][: raw.numel()].copy_(raw)
        out = self.arena[page][: raw.numel()].to("cuda")
        self.arena.unpin(page)
        return out

    def upload_many(self, xs: t.Sequence[torch.Tensor]) -> list[torch.Tensor]:
        pages: list[int] = []
        outs = []
        for x in xs:
            page = self.arena.pin(block=False)  # clean: near miss, break leads to the loop that unpins all pages
            if page is None:
                break
            pages.append(page)
            raw = _as_bytes(x)
            self.arena[page][: raw.numel()].copy_(raw)
            outs.append(self.arena[page][: raw.numel()].cuda(non_blocking=True))
        torch.cuda.synchronize()
        for page in pages:
            self.arena.unpin(page)
        return outs

    def download(self, x: torch.Tensor, retries: int = 3) -> bytes:
        for attempt in range(retries):
            page = self.arena.pin()  # leak: a failed copy is retried with a new page, the old one stays pinned
            try:
                self.arena[page][: x.numel()].copy_(_as_bytes(x))
            except RuntimeError:
                if attempt + 1 == retries:
                    raise
                continue
            data = bytes(self.arena[page][: x.numel()].tolist())
            self.arena.unpin(page)
            return data
        return b""

    def download_chunk(self, x: torch.Tensor, retries: int = 3) -> bytes:
        for _ in range(retries):
            page = self.arena.pin()  # clean: near miss, finally runs before continue and return
            try:
                self.arena[page][: x.numel()].copy_(_as_bytes(x))
                return bytes(self.arena[page][: x.numel()].tolist())
            except RuntimeError:
                continue
            finally:
                self.arena.unpin(page)
        return b""


class BackgroundStager(Stager):
    """A thread moves pages from the inbox to the device."""

    def __init__(self, arena: PinnedArena) -> None:
        super().__init__(arena)
        self._inbox: queue.Queue[tuple[int, int] | None] = queue.Queue()
        self._log_fh = open("stager.log", "a")  # leak: stop() never closes it
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def submit(self, x: torch.Tensor) -> None:
        raw = _as_bytes(x)
        page = self.arena.pin()  # clean: travels through the queue, _loop() unpins it
        self.arena[page][: raw.numel()].copy_(raw)
        self._inbox.put((page, raw.numel()))

    def _loop(self) -> None:
        while True:
            job = self._inbox.get()
            if job is None:
                return
            page, n = job
            self.arena[page][:n].cuda()
            self.arena.unpin(page)

    def stop(self) -> None:
        self._inbox.put(None)
        self._thread.join()

    def preheat(self, n: int) -> None:
        for _ in range(n):
            self.arena[self.arena.pin()].zero_()  # leak: the page id is never kept
