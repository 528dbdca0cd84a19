from __future__ import annotations

from typing import Callable, Iterator

from .chunks import Chunk
from .reader import ShardReader
from .shuffle import ShuffleWindow


class Batcher:
    def __init__(self, reader: ShardReader, window: ShuffleWindow, width: int) -> None:
        self.reader = reader
        self.window = window
        self.width = width
        self.pinned: dict[str, Chunk] = {}

    def batches(self, shards: list[str]) -> Iterator[list[bytes]]:
        batch: list[bytes] = []
        for shard in shards:
            for chunk in self.reader.iter_shard(shard):  # clean: near miss, the window owns them, leavers are unreffed
                out = self.window.push(chunk)
                if out is None:
                    continue
                batch.append(bytes(out.payload()))
                out.unref()
                if len(batch) == self.width:
                    yield batch
                    batch = []
        if batch:
            yield batch
        self.window.clear()

    def first_matching(self, shard: str, pred: Callable[[bytes], bool]) -> bytes | None:
        for chunk in self.reader.iter_shard(shard):  # leak: chunks that do not match are passed over without unref
            data = bytes(chunk.payload())
            if not pred(data):
                continue
            chunk.unref()
            return data
        return None

    def pin(self, chunk: Chunk) -> bool:
        """Keep a chunk past the window for the validation pass."""
        if chunk.shard in self.pinned:
            return False
        self.pinned[chunk.shard] = chunk.share()  # clean: near miss, one pin a shard, unpin_all() unrefs
        return True

    def unpin_all(self) -> None:
        while self.pinned:
            _, chunk = self.pinned.popitem()
            chunk.unref()

    def preview(self, shard: str, crc: int) -> bytes:
        with self.reader.opener(shard) as fh:  # clean: with
            chunk = self.reader.read_verified(fh, shard, crc)  # leak: the too-short return comes before unref
            if chunk is None or chunk.length < 16:
                return b""
            head = bytes(chunk.payload()[:16])
            chunk.unref()
            return head
