"""Segment files: an 8-byte magic and then fixed-size records."""
from __future__ import annotations

import os
from typing import BinaryIO, Optional

MAGIC = b"KVSEG\x00\x01\n"


def create_segment(path: str) -> BinaryIO:
    fh = open(path, "w+b")  # clean: returned to the caller
    fh.write(MAGIC)
    fh.flush()
    return fh


def open_segment(path: str) -> Optional[BinaryIO]:
    """None when the file is absent or is not a segment."""
    if not os.path.exists(path):
        return None
    fh = open(path, "r+b")  # leak: a foreign magic returns None with the file left open
    if fh.read(len(MAGIC)) != MAGIC:
        return None
    return fh


def record_count(path: str, record: int) -> int:
    fh = open_segment(path)  # clean: closed on every way after the None check
    if fh is None:
        return 0
    try:
        fh.seek(0, os.SEEK_END)
        return max(0, fh.tell() - len(MAGIC)) // record
    finally:
        fh.close()


def last_record(path: str, record: int) -> Optional[bytes]:
    fh = open_segment(path)  # leak: an empty segment returns before the close
    if fh is None:
        return None
    fh.seek(0, os.SEEK_END)
    end = fh.tell()
    if end < len(MAGIC) + record:
        return None
    fh.seek(end - record)
    data = fh.read(record)
    fh.close()
    return data
