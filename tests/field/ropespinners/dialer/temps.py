"""Temp files with names from a counter; at most `cap` exist together."""
import os
from typing import BinaryIO, List, Optional, Set


class TempNames:
    def __init__(self, folder: str, cap: int):
        self.folder = folder
        self._numbers: List[int] = list(range(cap))
        self._live: Set[int] = set()

    def new_file(self) -> Optional["TempFile"]:
        if not self._numbers:
            return None
        num = self._numbers.pop()  # leak: a path that exists already returns None without the number going back
        path = os.path.join(self.folder, f"part-{num:04d}")
        if os.path.exists(path):
            return None
        self._live.add(num)
        return TempFile(self, num, path)

    def retire(self, num: int) -> None:
        self._live.discard(num)
        self._numbers.append(num)


class TempFile:
    def __init__(self, names: TempNames, num: int, path: str):
        self.names = names
        self.num = num
        self.path = path
        self.f: BinaryIO = open(path, "wb")  # clean: closed by commit() and discard()

    def commit(self, target: str) -> None:
        self.f.close()
        os.replace(self.path, target)
        self.names.retire(self.num)

    def discard(self) -> None:
        self.f.close()
        os.unlink(self.path)
        self.names.retire(self.num)
