"""Embedding service: pinned staging buffers, a table of request slots and a batcher thread."""
from __future__ import annotations

import logging
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import Callable

import torch

log = logging.getLogger("embed")

DIM = 768


class StagingPool:
    """Pinned host tensors by power of two sizes. borrow and give back by repay."""

    def __init__(self, max_rows: int = 1024) -> None:
        self.max_rows = max_rows
        self._bins: dict[int, list[torch.Tensor]] = {}
        self._mu = threading.Lock()
        self.lent = 0

    @staticmethod
    def bin_of(rows: int) -> int:
        return 1 << max(0, rows - 1).bit_length()

    def borrow(self, rows: int) -> torch.Tensor:
        size = self.bin_of(rows)
        with self._mu:
            self.lent += 1
            spare = self._bins.get(size)
            if spare:
                return spare.pop()
        return torch.empty(size, DIM, pin_memory=True)

    def borrow_or_none(self, rows: int) -> torch.Tensor | None:
        if rows > self.max_rows or self.lent > 64:
            return None
        return self.borrow(rows)  # clean: handed on

    def repay(self, t: torch.Tensor) -> None:
        with self._mu:
            self.lent -= 1
            self._bins.setdefault(t.shape[0], []).append(t)

    def grow(self, sizes: list[int]) -> None:
        """Makes sure that there is one spare tensor of each size."""
        for rows in sizes:
            self.borrow(rows)  # leak: the tensor is made and not put into its bin

    def prefault(self, sizes: list[int]) -> None:
        held = [self.borrow(rows) for rows in sizes]  # clean: repaid in the loop
        for t in held:
            t.zero_()
        while held:
            self.repay(held.pop())


staging = StagingPool()


@dataclass
class EmbedRequest:
    texts: list[str]
    on_done: Callable[[list[list[float]]], None]
    buf: torch.Tensor | None = None
    created: float = field(default_factory=time.monotonic)
    dropped: bool = False


def tokenize(texts: list[str]) -> list[list[int]]:
    return [[ord(c) % 30000 for c in t[:512]] for t in texts]


def encode_into(texts: list[str]) -> torch.Tensor:
    """Token features of the texts in a staging tensor, which the caller repays."""
    buf = staging.borrow(len(texts))  # clean: handed to the caller
    for i, ids in enumerate(tokenize(texts)):
        buf[i].fill_(float(sum(ids)))
    return buf


def encode_query(text: str, device: str) -> torch.Tensor:
    host = encode_into([text])  # leak: copied to the device, the staging tensor is dropped
    return host[:1].to(device, non_blocking=False)


def encode_documents(texts: list[str], device: str) -> torch.Tensor:
    host = encode_into(texts)  # clean: repaid after the copy
    dev = host[: len(texts)].to(device)
    staging.repay(host)
    return dev


def rescore(texts: list[str], weights: torch.Tensor) -> list[float]:
    src = staging.borrow_or_none(len(texts))  # leak: no room for the scratch returns without repaying it
    if src is None:
        return []
    scratch = staging.borrow_or_none(len(texts))  # clean: None-checked and repaid
    if scratch is None:
        return [0.0] * len(texts)
    torch.mul(src, weights, out=scratch)
    scores = scratch.sum(dim=1).tolist()
    staging.repay(scratch)
    staging.repay(src)
    return scores


def pad_to(buf: torch.Tensor, rows: int) -> torch.Tensor:
    """The same tensor when it is large enough; otherwise a larger one, and the old one is repaid."""
    if buf.shape[0] >= rows:
        return buf
    larger = staging.borrow(rows)  # clean: returned in place of the old one
    larger[: buf.shape[0]].copy_(buf)
    staging.repay(buf)
    return larger


def stack_rows(chunks: list[torch.Tensor]) -> list[float]:
    acc = staging.borrow(1)  # clean: near miss, pad_to repays the small one
    used = 0
    for chunk in chunks:
        acc = pad_to(acc, used + chunk.shape[0])  # clean: near miss, takes the old one over
        acc[used : used + chunk.shape[0]].copy_(chunk)
        used += chunk.shape[0]
    out = acc[:used].mean(dim=0).tolist()
    staging.repay(acc)
    return out


def concat_rows(chunks: list[torch.Tensor]) -> list[float]:
    total = 0
    acc = staging.borrow(64)  # leak: replaced by a larger one without being repaid
    for chunk in chunks:
        if total + chunk.shape[0] > acc.shape[0]:
            bigger = staging.borrow(2 * (total + chunk.shape[0]))  # leak: replaced when it grows again
            bigger[:total].copy_(acc[:total])
            acc = bigger
        acc[total : total + chunk.shape[0]].copy_(chunk)
        total += chunk.shape[0]
    out = acc[:total].sum(dim=0).tolist()
    staging.repay(acc)
    return out


class Batcher(threading.Thread):
    """Requests enter with a filled buffer; the thread computes and repays."""

    def __init__(self, model: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(daemon=True)
        self.model = model
        self.inbox: queue.Queue[EmbedRequest | None] = queue.Queue()
        self.late: list[EmbedRequest] = []
        self.deadline = 2.0

    def submit(self, req: EmbedRequest) -> None:
        req.buf = encode_into(req.texts)  # clean: repaid by the thread in each of its branches
        self.inbox.put(req)

    def run(self) -> None:
        while (req := self.inbox.get()) is not None:
            if req.dropped:
                self._retire(req)
                continue
            if time.monotonic() - req.created > self.deadline:
                self.late.append(req)
                continue
            out = self.model(req.buf[: len(req.texts)])
            req.on_done(out.tolist())
            self._retire(req)
        for req in self.late:
            self._retire(req)
        self.late.clear()

    def _retire(self, req: EmbedRequest) -> None:
        if req.buf is not None:
            staging.repay(req.buf)
            req.buf = None


class StreamSession:
    """Chunks of a long document which arrive one by one."""

    def __init__(self, max_chunks: int) -> None:
        self.max_chunks = max_chunks
        self.parts: dict[int, torch.Tensor] = {}

    def add(self, index: int, texts: list[str]) -> bool:
        if len(self.parts) >= self.max_chunks:
            return False
        part = encode_into(texts)  # leak: a chunk that is sent twice replaces the one in the dict
        self.parts[index] = part
        return True

    def finish(self) -> torch.Tensor:
        total = torch.zeros(DIM)
        for index in sorted(self.parts):
            total += self.parts[index].sum(dim=0)
        for part in self.parts.values():
            staging.repay(part)
        self.parts.clear()
        return total


class TiledSession(StreamSession):
    def add(self, index: int, texts: list[str]) -> bool:
        old = self.parts.pop(index, None)
        if old is not None:
            staging.repay(old)
        self.parts[index] = encode_into(texts)  # clean: the former tile is repaid above
        return True
