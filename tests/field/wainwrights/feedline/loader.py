"""Prefetching threads and batches."""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass
from typing import Iterator, List, Optional, Tuple

import torch

from .slabs import Slab, SlabPool, SlabsClosed
from .sources import PairSource, RepeatSource

log = logging.getLogger(__name__)


class DecodeError(Exception):
    pass


@dataclass
class LoaderConfig:
    batch: int = 32
    depth: int = 4
    width: int = 224
    drop_last: bool = True


class Staging:
    def __init__(self, cfg: LoaderConfig) -> None:
        self._q: "queue.Queue[torch.Tensor]" = queue.Queue()
        for _ in range(cfg.depth + 1):
            self._q.put(torch.empty(cfg.batch, 3, cfg.width, cfg.width, pin_memory=True))

    def take(self) -> torch.Tensor:
        return self._q.get()  # clean: returned

    def give(self, t: torch.Tensor) -> None:
        self._q.put(t)


class Loader:
    def __init__(self, source: PairSource, pool: SlabPool, cfg: LoaderConfig, decode) -> None:
        self.source, self.pool, self.cfg, self.decode = source, pool, cfg, decode
        self.staging = Staging(cfg)
        self._out: "queue.Queue[Optional[Tuple[torch.Tensor, List[str]]]]" = queue.Queue(cfg.depth)
        self._stop = threading.Event()
        self._last: Optional[torch.Tensor] = None
        self._thread = threading.Thread(target=self._produce, daemon=True)

    def _produce(self) -> None:
        rows: List[Tuple[Slab, str]] = []
        try:
            for _, slab, caption in self.source.walk():
                rows.append((slab, caption))
                if len(rows) == self.cfg.batch:
                    self._emit(rows)
                    rows = []
                if self._stop.is_set():
                    break
            if rows and not self.cfg.drop_last:
                self._emit(rows)
                rows = []
        except SlabsClosed:
            log.info("producer ends, pool closed")
        finally:
            for slab, _ in rows:
                slab.decref()
            self._out.put(None)

    def _emit(self, rows: List[Tuple[Slab, str]]) -> None:
        tensor = self.staging.take()  # leak: stop() drains the queue of ready batches without giving their tensors back
        for i, (slab, _) in enumerate(rows):
            tensor[i].copy_(self.decode(slab.mem[: slab.used], self.cfg.width))
            slab.decref()
        self._out.put((tensor, [caption for _, caption in rows]))

    def __iter__(self) -> Iterator[Tuple[torch.Tensor, List[str]]]:
        self._thread.start()
        while True:
            got = self._out.get()
            if self._last is not None:
                self.staging.give(self._last)
                self._last = None
            if got is None:
                return
            self._last = got[0]
            yield got[0].cuda(non_blocking=True), got[1]

    def stop(self) -> None:
        self._stop.set()
        while self._out.get() is not None:
            pass
        self._thread.join()

    def preview(self, n: int) -> List[torch.Tensor]:
        staged = self.staging.take()  # clean: finally
        out = []
        try:
            for _, slab, _ in self.source.walk():
                staged[0].copy_(self.decode(slab.mem[: slab.used], self.cfg.width))
                slab.decref()
                out.append(staged[0].clone())
                if len(out) == n:
                    break
        finally:
            self.staging.give(staged)
        return out


def decoded(decode, name: str, slab: Slab, width: int) -> torch.Tensor:
    image = decode(slab.mem[: slab.used], width)
    slab.decref()
    if image is None:
        raise DecodeError(name)
    return image


def calibrate(repeat: RepeatSource, staging: Staging, decode, width: int, epochs: int) -> Optional[torch.Tensor]:
    if repeat.fill() == 0:
        return None
    acc = staging.take()  # leak: DecodeError of decoded() passes through with the tensor taken
    acc.zero_()
    n = 0
    for name, slab in repeat.walk(epochs):
        acc[0].add_(decoded(decode, name, slab, width))
        n += 1
    mean = acc[0].clone().div_(max(n, 1))
    staging.give(acc)
    return mean
