"""Loaders: one for full checkpoints, one for deltas on top of a loaded model."""
from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Callable

from .shards import Shard, ShardCache
from .staging import StagingSlot, StagingSlots, stage, stage_fitting

log = logging.getLogger(__name__)

Install = Callable[[str, memoryview], None]


class ShardedLoader:
    def __init__(self, cache: ShardCache, slots: StagingSlots, install: Install):
        self.cache, self.slots, self.install = cache, slots, install
        self.skipped: list[str] = []

    def load_tensor(self, shard: Shard, name: str) -> bool:
        slot = stage(self.slots, shard.payload(shard.tensors[name]))  # clean: freed after the install
        if slot is None:
            self.skipped.append(name)
            return False
        self.install(name, memoryview(slot.data)[: slot.length])
        slot.free()
        return True

    def load_shard(self, file: str, wanted: set[str]) -> int:
        shard = self.cache.open_shard(file)  # leak: a shard without any wanted tensor is not closed
        names = wanted & shard.tensors.keys()
        if not names:
            log.debug("nothing wanted in %s", file)
            return 0
        loaded = sum(self.load_tensor(shard, name) for name in sorted(names))
        self.cache.close_shard(shard)
        return loaded

    def load_all(self, weight_map: dict[str, str], workers: int = 4) -> int:
        by_file: dict[str, set[str]] = {}
        for name, file in weight_map.items():
            by_file.setdefault(file, set()).add(name)
        total = 0
        with ThreadPoolExecutor(workers) as pool:
            futures = [pool.submit(self.load_shard, file, names) for file, names in by_file.items()]
            for future in as_completed(futures):
                total += future.result()
        return total


class DeltaLoader:
    """Stages a delta in begin(), then either commit() or rollback()."""

    def __init__(self, cache: ShardCache, slots: StagingSlots, install: Install):
        self.cache, self.slots, self.install = cache, slots, install
        self.shard: Shard | None = None
        self.staged: dict[str, StagingSlot] = {}

    def begin(self, file: str, names: list[str]) -> bool:
        self.shard = self.cache.open_shard(file)  # clean: closed by _end, which commit and rollback call
        for name in names:
            slot = stage(self.slots, self.shard.payload(self.shard.tensors[name]))  # leak: rollback clears the dict without freeing the slots
            if slot is None:
                self.rollback()
                return False
            self.staged[name] = slot
        return True

    def commit(self) -> int:
        count = 0
        for name, slot in self.staged.items():
            self.install(name, memoryview(slot.data)[: slot.length])
            slot.free()
            count += 1
        self.staged.clear()
        self._end()
        return count

    def rollback(self) -> None:
        log.info("delta dropped, %d tensors", len(self.staged))
        self.staged.clear()
        self._end()

    def _end(self) -> None:
        if self.shard is not None:
            self.cache.close_shard(self.shard)
            self.shard = None


def load_bias_vectors(cache: ShardCache, slots: StagingSlots, file: str, install: Install) -> int:
    shard = cache.open_shard(file)  # clean: closed before the return
    names = [n for n in shard.tensors if n.endswith(".bias")]
    staged = stage_fitting(slots, [shard.payload(shard.tensors[n]) for n in names])  # clean: all freed below
    for name, slot in zip(names, staged):
        install(name, memoryview(slot.data)[: slot.length])
    for slot in staged:
        slot.free()
    cache.close_shard(shard)
    return len(staged)


def tensor_bytes(cache: ShardCache, name: str, files: list[str]) -> bytes:
    shard = cache.find_newest(name, files)  # clean: closed once the payload is copied
    if shard is None:
        return b""
    data = shard.payload(shard.tensors[name])
    cache.close_shard(shard)
    return data


def tied_weights(cache: ShardCache, slots: StagingSlots, files: list[str], install: Install) -> bool:
    """Installs the embedding as lm_head when the checkpoint has none of its own."""
    head = cache.find("lm_head.weight", files)  # clean: near miss, closed at once if there is one
    if head is not None:
        cache.close_shard(head)
        return False
    emb = cache.find("model.embed_tokens.weight", files)  # leak: stays open if the tensor does not fit a slot
    if emb is None:
        return False
    slot = stage(slots, emb.payload(emb.tensors["model.embed_tokens.weight"]))  # clean: freed after the install
    if slot is None:
        return False
    install("lm_head.weight", memoryview(slot.data)[: slot.length])
    slot.free()
    cache.close_shard(emb)
    return True
