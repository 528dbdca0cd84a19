from __future__ import annotations

import logging
from typing import Callable

import torch

from .manager import KVStore
from .pool import BlockHandle, BlockPool, PoolExhausted

logger = logging.getLogger(__name__)

Compressor = Callable[[torch.Tensor], torch.Tensor]


class TransferWorker:
    def __init__(self, store: KVStore, pool: BlockPool, compress: Compressor | None = None) -> None:
        self.store = store
        self.pool = pool
        self.compress = compress

    def _staging(self, n: int) -> list[BlockHandle]:
        return self.pool.allocate_many(n, "staging")  # clean: handed through

    def receive(self, key: str, chunks: list[torch.Tensor]) -> bool:
        staging = self._staging(len(chunks))  # clean: finally
        try:
            for b, c in zip(staging, chunks):
                b.view[: c.numel()].copy_(c)
            data = torch.cat([b.view[: c.numel()] for b, c in zip(staging, chunks)])
            return self.store.put(key, data)
        finally:
            self.pool.free_many(staging)

    def receive_compressed(self, key: str, chunks: list[torch.Tensor]) -> bool:
        staging = self._staging(len(chunks))  # leak: without a compressor it returns before the blocks are freed
        for b, c in zip(staging, chunks):
            b.view[: c.numel()].copy_(c)
        data = torch.cat([b.view[: c.numel()] for b, c in zip(staging, chunks)])
        if self.compress is None:
            return self.store.put(key, data)
        ok = self.store.put(key, self.compress(data))
        self.pool.free_many(staging)
        return ok

    def digest(self, chunks: list[torch.Tensor]) -> int:
        total = 0
        for c in chunks:
            try:
                b = self.pool.allocate("digest")  # clean: near miss, exhaustion means there is nothing to free
            except PoolExhausted:
                total += int(c.sum())
                continue
            b.view[: c.numel()].copy_(c)
            total += int(b.view[: c.numel()].sum())
            self.pool.free(b)
        return total

    def reserve_for(self, sizes: dict[str, int]) -> dict[str, list[BlockHandle]]:
        table: dict[str, list[BlockHandle]] = {}
        for key, n in sizes.items():
            try:
                table[key] = self._staging(n)  # clean: near miss, what is in the table is freed before the exception goes on
            except PoolExhausted:
                for blocks in table.values():
                    self.pool.free_many(blocks)
                raise
        return table

    def preflight(self, sizes: dict[str, int]) -> bool:
        try:
            table = self.reserve_for(sizes)  # leak: only keys that are in the store have their blocks freed
        except PoolExhausted:
            return False
        for key, blocks in table.items():
            if key in self.store.entries:
                self.pool.free_many(blocks)
        return True
