from __future__ import annotations

import json
import os
from typing import IO, List, Optional

from .pool import ConnectionPool


class WalReplayer:
    """Replays the write-ahead log segments of the offline job."""

    def __init__(self, pool: ConnectionPool, directory: str) -> None:
        self.pool = pool
        self.directory = directory

    def _open_segment(self, name: str) -> Optional[IO[str]]:
        path = os.path.join(self.directory, name)
        if not os.path.exists(path):
            return None
        segment = open(path)  # leak: an alien header returns None with the file open
        header = segment.readline()
        if not header.startswith("wal1"):
            return None
        return segment

    def replay(self, name: str) -> int:
        segment = self._open_segment(name)  # leak: no connection returns 0 with the segment open
        if segment is None:
            return 0
        conn = self.pool.get_conn()  # clean: put back after the replay
        if conn is None:
            return 0
        applied = 0
        for line in segment:
            record = json.loads(line)
            conn.put(record["k"], record["v"])
            applied += 1
        segment.close()
        self.pool.put_conn(conn)
        return applied

    def count(self, names: List[str]) -> int:
        total = 0
        for name in names:
            segment = self._open_segment(name)  # clean: near miss, continue only for None
            if segment is None:
                continue
            with segment:
                total += sum(1 for _ in segment)
        return total
