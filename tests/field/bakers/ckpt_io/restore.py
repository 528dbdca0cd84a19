"""Reading of checkpoints back, resharding on the way."""
from __future__ import annotations

import os
from typing import BinaryIO, Callable, Dict, Iterator, List, Optional

from .staging import StagingArea, StagingBlock


class ShardFiles:
    """Shard files open for the length of a restore."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._files: List[BinaryIO] = []

    def open_one(self, name: str) -> BinaryIO:
        f = open(os.path.join(self.root, name), "rb")  # clean: near miss, returned as well, but the list closes it
        self._files.append(f)
        return f

    def __enter__(self) -> "ShardFiles":
        return self

    def __exit__(self, *exc: object) -> None:
        for f in self._files:
            f.close()
        self._files.clear()


class Restorer:
    def __init__(self, area: StagingArea, root: str) -> None:
        self.area = area
        self.root = root
        self.missing: List[str] = []

    def _load(self, name: str) -> Optional[StagingBlock]:
        """A rented block with the shard's bytes; the caller hands it in."""
        path = os.path.join(self.root, name)
        block = self.area.rent()  # clean: handed in when the file is missing, else returned
        try:
            with open(path, "rb") as f:  # clean: with
                block.put(f.read())
        except FileNotFoundError:
            self.missing.append(name)
            self.area.hand_in(block)
            return None
        return block

    def load_bytes(self, name: str) -> bytes:
        block = self._load(name)  # leak: the payload is copied and the block dropped
        if block is None:
            return b""
        return block.payload()

    def load_into(self, name: str, sink: Callable[[bytes], None]) -> bool:
        block = self._load(name)  # clean: None holds nothing, else handed in
        if block is None:
            return False
        sink(block.payload())
        self.area.hand_in(block)
        return True

    def merge(self, names: List[str]) -> bytes:
        parts: Dict[str, StagingBlock] = {}
        for name in names:
            block = self._load(name)  # leak: a missing shard gives up on the merge with the others still rented
            if block is None:
                return b""
            parts[name] = block
        out = b"".join(parts[n].payload() for n in sorted(parts))
        for block in parts.values():
            self.area.hand_in(block)
        return out

    def iter_blocks(self, names: List[str]) -> Iterator[bytes]:
        for name in names:
            block = self._load(name)  # clean: near miss, continue for None, finally around the yield
            if block is None:
                continue
            try:
                yield block.payload()
            finally:
                self.area.hand_in(block)

    def sizes(self, names: List[str]) -> Dict[str, int]:
        out = {}
        with ShardFiles(self.root) as files:
            for name in names:
                f = files.open_one(name)  # clean: near miss, the enclosing context closes it
                out[name] = f.seek(0, os.SEEK_END)
        return out
