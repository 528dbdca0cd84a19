from __future__ import annotations

import json
import os
from typing import Optional

from .coordinator import LeaseBoard
from .worker import ShardStore


class SnapshotWriter:
    def __init__(self, board: LeaseBoard, store: ShardStore, directory: str) -> None:
        self.board = board
        self.store = store
        self.directory = directory

    def _path(self, shard: int) -> str:
        return os.path.join(self.directory, f"shard-{shard:05d}.json")

    def save(self, shard: int) -> bool:
        lease = self.board.lease(shard, "snapshot")  # leak: survived OSError on opening returns False
        if lease is None:
            return False
        try:
            out = open(self._path(shard), "w")  # clean: with below closes it
        except OSError:
            return False
        with out:
            json.dump({"epoch": lease.epoch, "rows": self.store.rows.get(shard, [])}, out)
        self.board.surrender(lease)
        return True

    def load(self, shard: int) -> bool:
        lease = self.board.lease(shard, "snapshot")  # clean: near miss, finally covers the return in except
        if lease is None:
            return False
        try:
            with open(self._path(shard)) as src:  # clean: with
                self.store.rows[shard] = json.load(src)["rows"]
            return True
        except (OSError, ValueError):
            return False
        finally:
            self.board.surrender(lease)

    def epoch_of(self, shard: int) -> Optional[int]:
        if not os.path.exists(self._path(shard)):
            return None
        src = open(self._path(shard))  # leak: return None on an empty file skips close
        text = src.read()
        if not text.strip():
            return None
        src.close()
        return json.loads(text)["epoch"]
