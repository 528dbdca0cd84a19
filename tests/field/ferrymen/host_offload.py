"""Optimizer-state offload: reference-counted host blocks with a pinned arena below them."""
from __future__ import annotations

import collections
import logging
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Callable, Iterable, Optional

import torch

log = logging.getLogger("offload")


class PinnedArena:
    def __init__(self, chunk: int, chunks: int) -> None:
        self.chunk = chunk
        self._spare = [torch.empty(chunk, dtype=torch.uint8, pin_memory=True) for _ in range(chunks)]
        self._mu = threading.Lock()

    def obtain(self) -> Optional[torch.Tensor]:
        with self._mu:
            return self._spare.pop() if self._spare else None

    def dispose(self, chunk: torch.Tensor) -> None:
        with self._mu:
            self._spare.append(chunk)


class Block:
    """A chunk with a reference count. A new block has one reference, which is its creator's."""

    def __init__(self, arena: PinnedArena, key: str, chunk: torch.Tensor) -> None:
        self.arena, self.key, self.chunk = arena, key, chunk
        self.refs = 1
        self.dirty = False

    def incref(self) -> "Block":
        self.refs += 1
        return self

    def decref(self) -> None:
        self.refs -= 1
        if self.refs == 0:
            self.arena.dispose(self.chunk)
            self.chunk = None


class BlockStore:
    """Blocks by key. The store holds one reference to each; lookup() gives another."""

    def __init__(self, arena: PinnedArena) -> None:
        self.arena = arena
        self.blocks: dict[str, Block] = {}

    def create(self, key: str) -> Optional[Block]:
        """A new block, not in the table yet."""
        chunk = self.arena.obtain()  # clean: near miss, the block disposes of it at its last decref
        if chunk is None:
            return None
        return Block(self.arena, key, chunk)

    def publish(self, block: Block) -> None:
        """Takes over the creator's reference."""
        old = self.blocks.pop(block.key, None)
        if old is not None:
            old.decref()
        self.blocks[block.key] = block

    def lookup(self, key: str) -> Optional[Block]:
        block = self.blocks.get(key)
        if block is None:
            return None
        return block.incref()  # clean: the caller's reference

    def forget(self, key: str) -> None:
        block = self.blocks.pop(key, None)
        if block is not None:
            block.decref()

    def merge_small(self, keys: Iterable[str], into: str) -> bool:
        """Several part-filled blocks into one."""
        target = self.create(into)  # clean: near miss, published, or given back when nothing came
        if target is None:
            return False
        offset = 0
        for key in list(keys):
            block = self.blocks.pop(key, None)
            if block is None:
                continue
            n = block.chunk.numel() // 2
            target.chunk[offset:offset + n].copy_(block.chunk[:n])
            offset += n
            block.decref()
        if offset == 0:
            target.decref()
            return False
        self.publish(target)
        return True


class Offloader:
    def __init__(self, store: BlockStore, workers: int = 2) -> None:
        self.store = store
        self.pool = ThreadPoolExecutor(workers)
        self.resident: dict[str, torch.Tensor] = {}
        self.moving: dict[str, Future] = {}
        self.hot: "collections.OrderedDict[str, Block]" = collections.OrderedDict()
        self.missing: list[str] = []

    def push(self, key: str, state: torch.Tensor) -> bool:
        block = self.store.create(key)  # clean: near miss, publish() takes it over
        if block is None:
            log.warning("no host block for %s", key)
            return False
        block.chunk[:state.numel() * state.element_size()].copy_(state.view(torch.uint8).flatten())
        self.store.publish(block)
        return True

    def push_if_changed(self, key: str, state: torch.Tensor) -> bool:
        """Writes a new block when the bytes differ from the stored ones."""
        fresh = self.store.create(key)  # leak: equal bytes return without decref
        if fresh is None:
            return False
        raw = state.view(torch.uint8).flatten()
        fresh.chunk[:raw.numel()].copy_(raw)
        stored = self.store.lookup(key)  # clean: decref'd right after the comparison
        if stored is not None:
            same = torch.equal(stored.chunk[:raw.numel()], fresh.chunk[:raw.numel()])
            stored.decref()
            if same:
                return False
        self.store.publish(fresh)
        return True

    def pull_many(self, wanted: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        out = {}
        for key, like in wanted.items():
            block = self.store.lookup(key)  # leak: a dirty block is skipped with its reference
            if block is None:
                self.missing.append(key)
                continue
            if block.dirty:
                log.debug("%s is being written", key)
                continue
            nbytes = like.numel() * like.element_size()
            out[key] = block.chunk[:nbytes].cuda().view(like.dtype).view_as(like)
            block.decref()
        return out

    def checksum(self, keys: Iterable[str]) -> int:
        total = 0
        for key in keys:
            block = self.store.lookup(key)  # leak: summed, never decref'd
            if block is not None:
                total = (total * 31 + int(block.chunk.to(torch.int64).sum())) & 0xFFFFFFFF
        return total

    # asynchronous movement ---------------------------------------------------------------------------
    def pull_async(self, key: str, done: Callable[[torch.Tensor], None]) -> bool:
        block = self.store.lookup(key)  # clean: near miss, the future's callback drops it
        if block is None:
            return False
        fut = self.pool.submit(lambda: block.chunk.cuda())
        fut.add_done_callback(lambda f: block.decref())
        fut.add_done_callback(lambda f: done(f.result()))
        return True

    def write_async(self, key: str, fill: Callable[[torch.Tensor], None]) -> bool:
        block = self.store.create(key)  # clean: near miss, the job publishes it
        if block is None:
            return False

        def job() -> None:
            block.dirty = True
            fill(block.chunk)
            block.dirty = False
            self.store.publish(block)

        self.moving[key] = self.pool.submit(job)
        return True

    def touch_async(self, key: str) -> bool:
        """Warm the pages of a block from a worker."""
        block = self.store.lookup(key)  # leak: the job does not drop the reference it was given
        if block is None:
            return False

        def job() -> int:
            return int(block.chunk[::4096].sum())

        self.moving[key] = self.pool.submit(job)
        return True

    # hot set: blocks that have an extra reference as long as they are in it -----------------------------
    def heat(self, key: str, limit: int) -> None:
        if key in self.hot:
            self.hot.move_to_end(key)
            return
        block = self.store.lookup(key)  # leak: eviction pops the oldest without decref
        if block is None:
            return
        self.hot[key] = block
        while len(self.hot) > limit:
            name, _ = self.hot.popitem(last=False)
            log.debug("%s is no longer hot", name)

    def cool(self, key: str) -> None:
        block = self.hot.pop(key, None)
        if block is not None:
            block.decref()

    def cool_all(self) -> None:
        for block in self.hot.values():
            block.decref()
        self.hot.clear()

    def scratch_sum(self, key: str) -> Optional[float]:
        """Sum in float64 through a private copy."""
        tmp = self.store.arena.obtain()  # leak: lost when the key is unknown
        if tmp is None:
            return None
        block = self.store.lookup(key)  # clean: decref'd below
        if block is None:
            return None
        tmp.copy_(block.chunk)
        block.decref()
        value = float(tmp.view(torch.float32).double().sum())
        self.store.arena.dispose(tmp)
        return value

    def close(self) -> None:
        self.pool.shutdown()
        self.cool_all()


class BlockView:
    """A view that holds a reference for as long as it lives."""

    def __init__(self, block: Block) -> None:
        self.block = block.incref()  # clean: near miss, the finalizer drops it
        weakref.finalize(self, block.decref)
