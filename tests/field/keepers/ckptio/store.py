"""Object store on a shared disk: reader leases keep the cleaner from deleting a step."""
from __future__ import annotations

import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import BinaryIO, Dict, List, Optional


class ObjectStore:
    def __init__(self, root: Path) -> None:
        self.root = root
        self._leases: Dict[int, int] = {}
        self._lock = threading.Lock()

    def lease(self, step: int) -> Optional[Path]:
        path = self.root / f"step{step}"
        with self._lock:
            if not path.exists():
                return None
            self._leases[step] = self._leases.get(step, 0) + 1
        return path

    def unlease(self, step: int) -> None:
        with self._lock:
            self._leases[step] -= 1
            if not self._leases[step]:
                del self._leases[step]

    def latest(self) -> Optional[int]:
        steps = sorted(int(p.name[4:]) for p in self.root.glob("step*"))
        return steps[-1] if steps else None

    def prune(self, keep: int) -> List[int]:
        gone: List[int] = []
        for path in sorted(self.root.glob("step*"))[:-keep]:
            step = int(path.name[4:])
            if step not in self._leases:
                shutil.rmtree(path)
                gone.append(step)
        return gone

    def open_part(self, folder: Path, name: str) -> Optional[BinaryIO]:
        try:
            return open(folder / name, "rb")  # clean: returned to the caller
        except FileNotFoundError:
            return None

    def make_scratch(self) -> str:
        return tempfile.mkdtemp(dir=self.root)  # clean: returned, callers remove it with drop_scratch

    def drop_scratch(self, folder: str) -> None:
        shutil.rmtree(folder, ignore_errors=True)
