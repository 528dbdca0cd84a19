"""Files of one checkpoint directory."""
from __future__ import annotations

import json
import os
from typing import BinaryIO, Dict, List, Optional

MAGIC = b"CKPT\x01"


class RecordFile:
    """Append-only file of length-prefixed records."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fh: Optional[BinaryIO] = open(path + ".tmp", "wb")  # clean: owned by the record file, commit or abort close it
        self._fresh = True

    def append(self, name: str, data: bytes) -> None:
        assert self._fh is not None
        if self._fresh:
            self._fh.write(MAGIC)
            self._fresh = False
        head = json.dumps({"name": name, "size": len(data)}).encode()
        self._fh.write(len(head).to_bytes(4, "little") + head + data)

    def commit(self) -> None:
        if self._fh is None:
            return
        self._fh.flush()
        os.fsync(self._fh.fileno())
        self._fh.close()
        self._fh = None
        os.replace(self.path + ".tmp", self.path)

    def abort(self) -> None:
        if self._fh is not None:
            self._fh.close()
            self._fh = None
            os.unlink(self.path + ".tmp")


def read_header(path: str) -> Optional[Dict[str, object]]:
    fh = open(path, "rb")  # leak: not closed when the magic does not match
    if fh.read(len(MAGIC)) != MAGIC:
        return None
    size = int.from_bytes(fh.read(4), "little")
    head = json.loads(fh.read(size))
    fh.close()
    return head


def write_record(path: str, name: str, data: bytes) -> bool:
    rec = RecordFile(path)  # clean: committed, or aborted in the handler
    try:
        rec.append(name, data)
    except OSError:
        rec.abort()
        return False
    rec.commit()
    return True


def merge_shards(paths: List[str], out_path: str) -> int:
    written = 0
    out = open(out_path, "wb")  # clean: closed in the finally
    try:
        for path in paths:
            if not os.path.exists(path):
                continue
            part = open(path, "rb")  # leak: continue for an empty shard
            body = part.read()
            if len(body) <= len(MAGIC):
                continue
            out.write(body)
            written += len(body)
            part.close()
    finally:
        out.close()
    return written
