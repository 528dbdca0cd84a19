"""Embedding server: requests are packed into pinned staging buffers and copied to the device.

The copy runs on its own stream; a staging buffer may go back only once its
copy is finished, which is why most releases sit in callbacks.
"""
from __future__ import annotations

import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Callable, Optional

import torch


@dataclass
class Staging:
    ids: torch.Tensor
    mask: torch.Tensor
    fill: int = 0


class StagingPool:
    def __init__(self, count: int, rows: int, width: int):
        self.rows = rows
        self.width = width
        self._q: queue.Queue[Staging] = queue.Queue()
        for _ in range(count):
            ids = torch.zeros(rows, width, dtype=torch.long).pin_memory()
            self._q.put(Staging(ids, torch.zeros_like(ids).pin_memory()))

    def claim(self, timeout: Optional[float] = None) -> Optional[Staging]:
        try:
            stg = self._q.get(timeout=timeout)  # clean: handed to the caller
        except queue.Empty:
            return None
        stg.fill = 0
        return stg

    def claim_for(self, lengths: list[int]) -> Optional[Staging]:
        """A staging buffer wide enough for every length."""
        stg = self.claim(timeout=1.0)  # leak: dropped when a text is wider than the buffers
        if stg is None:
            return None
        if max(lengths) > stg.ids.shape[1]:
            return None
        return stg

    def recycle(self, stg: Staging) -> None:
        self._q.put(stg)


class OutputCache:
    """Device-side output matrices, one list per row count."""

    def __init__(self, dim: int):
        self.dim = dim
        self._by_rows: dict[int, list[torch.Tensor]] = {}
        self.outstanding = 0

    def lend(self, rows: int) -> torch.Tensor:
        self.outstanding += 1
        stack = self._by_rows.setdefault(rows, [])
        return stack.pop() if stack else torch.empty(rows, self.dim, device="cuda")  # clean: lent to the caller

    def settle(self, t: torch.Tensor) -> None:
        self.outstanding -= 1
        self._by_rows[t.shape[0]].append(t)


class Embedder:
    def __init__(self, model, tokenizer, pool: StagingPool, outs: OutputCache):
        self.model = model
        self.tokenizer = tokenizer
        self.pool = pool
        self.outs = outs
        self.current: Optional[Staging] = None
        self.waiting: list[Future] = []
        self.lock = threading.Lock()
        self.exec = ThreadPoolExecutor(2)

    def _pack(self, stg: Staging, texts: list[str]) -> int:
        for row, text in enumerate(texts[: self.pool.rows]):
            toks = self.tokenizer(text)
            stg.ids[row, : len(toks)] = torch.tensor(toks)
            stg.mask[row, : len(toks)] = 1
        stg.fill = min(len(texts), self.pool.rows)
        return stg.fill

    def forward(self, stg: Staging) -> torch.Tensor:
        out = self.outs.lend(stg.fill)  # clean: returned to the caller
        self.model(
            stg.ids[: stg.fill].cuda(non_blocking=True),
            stg.mask[: stg.fill].cuda(non_blocking=True),
            out=out,
        )
        return out

    # -- synchronous -------------------------------------------------------

    def embed_normalized(self, texts: list[str]) -> Optional[torch.Tensor]:
        stg = self.pool.claim_for([len(self.tokenizer(t)) for t in texts])  # clean: recycled in finally
        if stg is None:
            return None
        try:
            self._pack(stg, texts)
            out = self.forward(stg)  # leak: rebound to the normalized copy before anything settles it
            out = torch.nn.functional.normalize(out, dim=-1)
            return out.cpu()
        finally:
            self.pool.recycle(stg)

    def embed_long(self, chunks: list[list[str]]) -> Optional[torch.Tensor]:
        parts: list[torch.Tensor] = []
        stg = self.pool.claim(timeout=5.0)  # clean: near miss, one buffer serves every chunk and is recycled at the end
        if stg is None:
            return None
        for chunk in chunks:
            if not chunk:
                continue
            self._pack(stg, chunk)
            parts.append(self.forward(stg))  # clean: near miss, every part is settled after the concatenation
        self.pool.recycle(stg)
        if not parts:
            return None
        whole = torch.cat(parts).cpu()
        for part in parts:
            self.outs.settle(part)
        return whole

    def similarity(self, a: list[str], b: list[str]) -> Optional[torch.Tensor]:
        left = self.pool.claim(timeout=5.0)  # leak: not recycled when the right buffer does not come
        right = self.pool.claim(timeout=5.0)  # clean: recycled on both ways out
        if left is None or right is None:
            if right is not None:
                self.pool.recycle(right)
            return None
        self._pack(left, a)
        self._pack(right, b)
        x, y = None, None
        try:
            x = self.forward(left)  # clean: settled in finally
            y = self.forward(right)  # clean: settled in finally
            return (x @ y.T).cpu()
        finally:
            for t in (x, y):
                if t is not None:
                    self.outs.settle(t)
            self.pool.recycle(left)
            self.pool.recycle(right)

    # -- with callbacks ----------------------------------------------------

    def embed_async(self, texts: list[str], done: Callable[[torch.Tensor], None]) -> Optional[Future]:
        stg = self.pool.claim(timeout=0.5)  # clean: near miss, the future's callback recycles it
        if stg is None:
            return None
        self._pack(stg, texts)
        fut = self.exec.submit(self._run_one, stg)
        fut.add_done_callback(lambda f: self.pool.recycle(stg))
        fut.add_done_callback(lambda f: done(f.result()))
        return fut

    def _run_one(self, stg: Staging) -> torch.Tensor:
        out = self.forward(stg)  # clean: settled before the copy is returned
        host = out.to("cpu", copy=True)
        self.outs.settle(out)
        return host

    def embed_fire(self, texts: list[str], sink: Callable[[torch.Tensor], None]) -> bool:
        stg = self.pool.claim(timeout=0.5)  # leak: a failed future returns from the callback before recycle
        if stg is None:
            return False
        self._pack(stg, texts)
        fut = self.exec.submit(self._run_one, stg)

        def finish(f: Future) -> None:
            if f.exception() is not None:
                sink(torch.empty(0))
                return
            sink(f.result())
            self.pool.recycle(stg)

        fut.add_done_callback(finish)
        return True

    # -- accumulating batcher ----------------------------------------------

    def add(self, toks: list[int]) -> bool:
        with self.lock:
            if self.current is None:
                self.current = self.pool.claim(timeout=0.1)  # clean: near miss, held in self.current until _flush() recycles it
                if self.current is None:
                    return False
            row = self.current.fill
            self.current.ids[row, : len(toks)] = torch.tensor(toks)
            self.current.fill += 1
            if self.current.fill == self.pool.rows:
                self._flush()
            return True

    def _flush(self) -> None:
        stg, self.current = self.current, None
        if stg is None:
            return
        self._run_one(stg)
        self.pool.recycle(stg)

    def warm(self, sizes: list[int]) -> None:
        out = None
        for rows in sizes:
            out = self.outs.lend(rows)  # leak: only the last of the sizes is settled
            out.zero_()
        if out is not None:
            self.outs.settle(out)
