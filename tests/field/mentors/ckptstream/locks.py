from __future__ import annotations

import os


class DirLock:
    """A lock by file, between the ranks that share a checkpoint folder."""

    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, ".lock")
        self.depth = 0

    def lock(self) -> bool:
        if self.depth:
            self.depth += 1
            return True
        try:
            os.mkdir(self.path)
        except FileExistsError:
            return False
        self.depth = 1
        return True

    def unlock(self) -> None:
        self.depth -= 1
        if self.depth == 0:
            os.rmdir(self.path)
