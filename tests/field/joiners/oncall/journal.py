"""Append-only incident journal."""
from __future__ import annotations

import json
import os
from typing import IO, Dict, Optional


class Journal:
    def __init__(self, path: str, max_bytes: int = 1 << 16):
        self.path = path
        self.max_bytes = max_bytes
        self._fh: IO[str] = open(path, "a")  # clean: kept for the journal's life, roll and close shut it
        self._by_incident: Dict[str, IO[str]] = {}

    def write(self, event: dict) -> None:
        self._fh.write(json.dumps(event) + "\n")
        self._fh.flush()
        if self._fh.tell() > self.max_bytes:
            self.roll()

    def roll(self) -> None:
        self._fh.close()
        os.replace(self.path, self.path + ".1")
        self._fh = open(self.path, "a")  # clean: near miss, the old one is closed above

    def incident_log(self, ident: str) -> IO[str]:
        fh = open(f"{self.path}.{ident}", "a")  # leak: an incident that is logged twice overwrites its handle
        self._by_incident[ident] = fh
        return fh

    def close_incident(self, ident: str) -> None:
        fh = self._by_incident.pop(ident, None)
        if fh is not None:
            fh.close()

    def last(self, kind: str) -> Optional[dict]:
        found = None
        f = open(self.path)  # clean: near miss, the break leads to the close
        for line in f:
            event = json.loads(line)
            if event.get("kind") == kind:
                found = event
                break
        f.close()
        return found

    def first(self, kind: str) -> Optional[dict]:
        f = open(self.path)  # leak: the hit is returned from the loop without close
        for line in f:
            event = json.loads(line)
            if event.get("kind") == kind:
                return event
        f.close()
        return None

    def close(self) -> None:
        self._fh.close()
        for ident in list(self._by_incident):
            self.close_incident(ident)
