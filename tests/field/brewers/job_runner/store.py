"""Job specs and logs on disk."""
from __future__ import annotations

import json
import os
from typing import IO, Dict, List, Optional

from .locks import KeyLocks, RwGate


class JobStore:
    def __init__(self, root: str, locks: KeyLocks, gate: RwGate) -> None:
        self.root = root
        self.locks = locks
        self.gate = gate
        self._logs: Dict[str, IO[str]] = {}

    def _path(self, name: str, suffix: str) -> str:
        return os.path.join(self.root, name + suffix)

    def save(self, name: str, spec: Dict[str, object]) -> None:
        with self.locks.holding(name):  # clean: with statement
            with open(self._path(name, ".json"), "w") as out:  # clean: with statement
                json.dump(spec, out)

    def load(self, name: str) -> Optional[Dict[str, object]]:
        self.gate.enter_read()  # leak: a missing file returns None, the gate is never left
        path = self._path(name, ".json")
        if not os.path.exists(path):
            return None
        with open(path) as src:  # clean: with statement
            spec = json.load(src)
        self.gate.leave_read()
        return spec

    def purge(self, keep: List[str]) -> int:
        if not self.gate.enter_write(0.1):  # clean: near miss, False took nothing, else left in finally
            return -1
        gone = 0
        try:
            for entry in os.listdir(self.root):
                name, suffix = os.path.splitext(entry)
                if suffix != ".json" or name in keep:
                    continue
                os.unlink(os.path.join(self.root, entry))
                gone += 1
            return gone
        finally:
            self.gate.leave_write()

    def rename(self, old: str, new: str) -> bool:
        if not self.locks.lock_all([old, new]):  # clean: both unlocked in finally
            return False
        try:
            os.rename(self._path(old, ".json"), self._path(new, ".json"))
            return True
        except FileNotFoundError:
            return False
        finally:
            self.locks.unlock(old)
            self.locks.unlock(new)

    def log(self, name: str) -> IO[str]:
        fh = self._logs.get(name)
        if fh is None or fh.closed:
            fh = open(self._path(name, ".log"), "a")  # clean: near miss, an earlier one is closed already, close_log closes this
            self._logs[name] = fh
        return fh

    def close_log(self, name: str) -> None:
        fh = self._logs.pop(name, None)
        if fh is not None:
            fh.close()
