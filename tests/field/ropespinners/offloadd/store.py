"""Table from tensor keys to frames."""
import os
from typing import BinaryIO, Dict, List, Optional, Tuple

from .frames import Frame, FrameArena


class PageStore:
    def __init__(self, arena: FrameArena, spill_path: str):
        self.arena = arena
        self.spill: BinaryIO = open(spill_path, "w+b")  # clean: closed by close()
        self.table: Dict[str, Tuple[Frame, int]] = {}
        self.on_disk: Dict[str, Tuple[int, int]] = {}

    def save(self, key: str, data: bytes) -> bool:
        f = self.arena.cut(len(data))  # clean: near miss, in the table, and one that it replaces is pasted
        if f is None:
            return False
        self.arena.view(f)[: len(data)] = data
        prev = self.table.pop(key, None)
        self.table[key] = (f, len(data))
        if prev is not None:
            self.arena.paste(prev[0])
        return True

    def demote(self, key: str) -> bool:
        ent = self.table.pop(key, None)
        if ent is None:
            return False
        f, n = ent
        at = self.spill.seek(0, os.SEEK_END)
        self.spill.write(self.arena.view(f)[:n])
        self.on_disk[key] = (at, n)
        self.arena.paste(f)
        return True

    def promote(self, key: str) -> bool:
        where = self.on_disk.get(key)
        if where is None:
            return key in self.table
        at, n = where
        f = self.arena.cut(n)  # leak: a short read returns with the frame cut
        if f is None:
            return False
        self.spill.seek(at)
        data = self.spill.read(n)
        if len(data) != n:
            return False
        self.arena.view(f)[:n] = data
        del self.on_disk[key]
        stale = self.table.pop(key, None)
        if stale is not None:
            self.arena.paste(stale[0])
        self.table[key] = (f, n)
        return True

    def detach(self, key: str) -> Optional[Tuple[Frame, int]]:
        """Takes a frame out of the table for a mover; the caller pastes it."""
        return self.table.pop(key, None)  # clean: handed to the caller

    def drop(self, key: str) -> None:
        ent = self.table.pop(key, None)
        if ent is not None:
            self.arena.paste(ent[0])
        self.on_disk.pop(key, None)

    def keys(self) -> List[str]:
        return list(self.table)

    def close(self) -> None:
        for key in self.keys():
            self.drop(key)
        self.spill.close()
