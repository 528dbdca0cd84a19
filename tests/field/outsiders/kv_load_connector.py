"""Consumer side of KV transfer: layer wise loads with completion callbacks."""
from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Optional

import torch

logger = logging.getLogger(__name__)


@dataclass
class ConnectorMeta:
    request_id: str
    num_layers: int
    remote: str
    skip_layers: frozenset[int] = frozenset()


class RecvBuffers:
    def __init__(self, count: int, shape: tuple[int, ...]) -> None:
        self._buffers = [torch.zeros(shape) for _ in range(count)]
        self._idle = set(range(count))

    def pin(self) -> int:
        return self._idle.pop() if self._idle else -1

    def unpin(self, i: int) -> None:
        self._idle.add(i)

    def __getitem__(self, i: int) -> torch.Tensor:
        return self._buffers[i]


class KVLoadConnector:
    def __init__(self, bufs: RecvBuffers, fetch: Callable[[str, int, torch.Tensor], None], layers: list[Any]) -> None:
        self.bufs = bufs
        self.fetch = fetch
        self.layers = layers
        self.exec = ThreadPoolExecutor(max_workers=2)
        self.pending: dict[tuple[str, int], tuple[int, Future]] = {}
        self.failed: set[str] = set()

    def start_load(self, meta: ConnectorMeta) -> int:
        started = 0
        for layer in range(meta.num_layers):
            key = (meta.request_id, layer)
            if layer in meta.skip_layers or key in self.pending:
                continue
            buf = self.bufs.pin()  # clean: recorded in pending, wait_for_layer() or abort() unpins
            if buf < 0:
                break
            fut = self.exec.submit(self.fetch, meta.remote, layer, self.bufs[buf])
            self.pending[key] = (buf, fut)
            started += 1
        return started

    def wait_for_layer(self, request_id: str, layer: int) -> bool:
        item = self.pending.pop((request_id, layer), None)
        if item is None:
            return False
        buf, fut = item
        try:
            fut.result()
            self.layers[layer].copy_(self.bufs[buf])
            return True
        except OSError:
            logger.exception("load of layer %d failed", layer)
            self.failed.add(request_id)
            return False
        finally:
            self.bufs.unpin(buf)

    def load_detached(self, meta: ConnectorMeta, layer: int) -> bool:
        buf = self.bufs.pin()  # clean: near miss, the done callback unpins
        if buf < 0:
            return False
        fut = self.exec.submit(self.fetch, meta.remote, layer, self.bufs[buf])
        fut.add_done_callback(partial(self._finish_detached, layer, buf))
        return True

    def _finish_detached(self, layer: int, buf: int, fut: Future) -> None:
        if fut.exception() is None:
            self.layers[layer].copy_(self.bufs[buf])
        self.bufs.unpin(buf)

    def load_best_effort(self, meta: ConnectorMeta, layer: int) -> bool:
        buf = self.bufs.pin()  # leak: the callback returns on an exception without unpinning
        if buf < 0:
            return False

        def done(fut: Future) -> None:
            if fut.exception() is not None:
                logger.warning("layer %d of %s not loaded", layer, meta.request_id)
                return
            self.layers[layer].copy_(self.bufs[buf])
            self.bufs.unpin(buf)

        self.exec.submit(self.fetch, meta.remote, layer, self.bufs[buf]).add_done_callback(done)
        return True

    def load_sync(self, meta: ConnectorMeta) -> int:
        loaded = 0
        for layer in range(meta.num_layers):
            buf = self.bufs.pin()  # leak: layers to skip are passed over after the pin
            if buf < 0:
                return loaded
            if layer in meta.skip_layers:
                continue
            self.fetch(meta.remote, layer, self.bufs[buf])
            self.layers[layer].copy_(self.bufs[buf])
            self.bufs.unpin(buf)
            loaded += 1
        return loaded

    def load_one_buffer(self, meta: ConnectorMeta) -> int:
        buf = self.bufs.pin()  # clean: near miss, skipped layers do not touch the buffer and the finally unpins it
        if buf < 0:
            return 0
        loaded = 0
        try:
            for layer in range(meta.num_layers):
                if layer in meta.skip_layers:
                    continue
                self.fetch(meta.remote, layer, self.bufs[buf])
                self.layers[layer].copy_(self.bufs[buf])
                loaded += 1
            return loaded
        finally:
            self.bufs.unpin(buf)

    def mean_of_layer(self, meta: ConnectorMeta, layer: int) -> Optional[float]:
        buf = self.bufs.pin()  # clean: unpinned before the value is returned
        if buf < 0:
            return None
        self.fetch(meta.remote, layer, self.bufs[buf])
        value = self.bufs[buf].mean().item()
        self.bufs.unpin(buf)
        return value

    def has_capacity(self, n: int) -> bool:
        taken = [self.bufs.pin() for _ in range(n)]  # leak: with one missing the others are not unpinned
        if any(i < 0 for i in taken):
            return False
        for i in taken:
            self.bufs.unpin(i)
        return True

    def abort(self, request_id: str) -> None:
        for key in [k for k in self.pending if k[0] == request_id]:
            buf, fut = self.pending.pop(key)
            fut.cancel()
            self.bufs.unpin(buf)
