"""Reading shards back, with a small cache of open files."""
import os
from typing import BinaryIO, Dict, List, Optional

from .manifest import Manifest
from .staging import StagingArena


class ShardReader:
    def __init__(self, root: str, max_open: int = 4) -> None:
        self.root = root
        self.max_open = max_open
        self._open: Dict[int, BinaryIO] = {}

    def file(self, index: int) -> BinaryIO:
        f = self._open.get(index)
        if f is None:
            if len(self._open) >= self.max_open:
                _, oldest = self._open.popitem()
                oldest.close()
            f = open(os.path.join(self.root, f"shard-0-{index}.bin"), "rb")  # clean: near miss, cached; eviction and close() close it
            self._open[index] = f
        return f

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()


def probe_shards(root: str, count: int) -> List[int]:
    sizes = []
    for i in range(count):
        f = open(os.path.join(root, f"shard-0-{i}.bin"), "rb")  # leak: an empty shard continues without close
        size = f.seek(0, os.SEEK_END)
        if size == 0:
            continue
        sizes.append(size)
        f.close()
    return sizes


def load_state(root: str, step: int, arena: StagingArena) -> Optional[Dict[int, int]]:
    manifest = Manifest.load(root, step)
    if manifest is None:
        return None
    reader = ShardReader(root)
    totals: Dict[int, int] = {}
    for index in sorted(set(manifest.entries.values())):
        staging = arena.reserve_within(10.0)  # clean: near miss, break only without a buffer
        if staging is None:
            break
        staging.length = reader.file(index).readinto(staging.raw)  # clean: the reader keeps it and is closed below
        totals[index] = staging.length
        arena.unreserve(staging)
    reader.close()
    return totals
