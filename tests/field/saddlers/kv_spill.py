"""File-backed spill tier for KV pages. One segment file per layer group, with an index on the side."""
from __future__ import annotations

import json
import os
import struct
import tempfile
from typing import BinaryIO, Dict, Iterator, List, Optional, Tuple

MAGIC = b"KVS1"
HEADER = struct.Struct("<4sIQ")


class CorruptSegment(Exception):
    pass


def write_segment(path: str, pages: List[bytes]) -> int:
    with open(path, "wb") as f:  # clean: with
        f.write(HEADER.pack(MAGIC, len(pages), sum(map(len, pages))))
        for page in pages:
            f.write(struct.pack("<I", len(page)))
            f.write(page)
        return f.tell()


def segment_page_count(path: str) -> int:
    f = open(path, "rb")  # leak: short or foreign header returns 0 without close
    head = f.read(HEADER.size)
    if len(head) < HEADER.size or head[:4] != MAGIC:
        return 0
    _, count, _ = HEADER.unpack(head)
    f.close()
    return count


def open_segment(path: str) -> BinaryIO:
    f = open(path, "rb")  # clean: near miss, closed on the bad header, else handed to the caller
    head = f.read(HEADER.size)
    if head[:4] != MAGIC:
        f.close()
        raise CorruptSegment(path)
    return f


def first_page(path: str) -> Optional[bytes]:
    try:
        f = open_segment(path)  # leak: an empty segment returns None with the file open
    except CorruptSegment:
        return None
    raw = f.read(4)
    if not raw:
        return None
    data = f.read(struct.unpack("<I", raw)[0])
    f.close()
    return data


def segment_size(path: str) -> int:
    return open_segment(path).seek(0, os.SEEK_END)  # leak: handle is used for its size and dropped


def iter_pages(path: str) -> Iterator[bytes]:
    f = open_segment(path)  # clean: near miss, the generator's finally closes also when the reader stops early
    try:
        while True:
            raw = f.read(4)
            if len(raw) < 4:
                return
            yield f.read(struct.unpack("<I", raw)[0])
    finally:
        f.close()


def iter_lengths(path: str, limit: int) -> Iterator[int]:
    f = open_segment(path)  # leak: returns at the limit without close
    for _ in range(limit):
        raw = f.read(4)
        if len(raw) < 4:
            break
        n = struct.unpack("<I", raw)[0]
        if n == 0:
            return
        f.seek(n, os.SEEK_CUR)
        yield n
    f.close()


def load_index(path: str) -> Dict[str, List[int]]:
    if not os.path.exists(path):
        return {}
    f = open(path)  # clean: finally closes also after the caught decode error
    try:
        return json.load(f)
    except json.JSONDecodeError:
        return {}
    finally:
        f.close()


def load_index_lenient(path: str) -> Dict[str, List[int]]:
    try:
        f = open(path)  # leak: the caught decode error returns without close
        index = json.load(f)
        f.close()
        return index
    except (OSError, ValueError):
        return {}


class SpillFile:
    """Append-only file of one layer group."""

    def __init__(self, path: str, max_bytes: int) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self.offsets: Dict[int, Tuple[int, int]] = {}
        self._generation = 0
        self._f: Optional[BinaryIO] = open(path, "w+b")  # clean: closed by roll() or close()

    def append(self, page_id: int, data: bytes) -> bool:
        assert self._f is not None
        pos = self._f.seek(0, os.SEEK_END)
        if pos + len(data) > self.max_bytes:
            return False
        self._f.write(data)
        self.offsets[page_id] = (pos, len(data))
        return True

    def read(self, page_id: int) -> bytes:
        assert self._f is not None
        pos, n = self.offsets[page_id]
        self._f.seek(pos)
        return self._f.read(n)

    def roll(self) -> None:
        assert self._f is not None
        self._f.close()
        self._generation += 1
        self.offsets.clear()
        self._f = open(f"{self.path}.{self._generation}", "w+b")  # clean: near miss, the former file is closed above

    def close(self) -> None:
        if self._f is not None:
            self._f.close()
            self._f = None


class SpillTier:
    def __init__(self, root: str, max_bytes: int = 1 << 20) -> None:
        self.root = root
        self.max_bytes = max_bytes
        self.groups: Dict[int, SpillFile] = {}
        self.journal: Optional[BinaryIO] = None

    def start_journal(self, tag: str) -> None:
        self.journal = open(os.path.join(self.root, f"{tag}.journal"), "ab")  # leak: a second tag overwrites the open journal

    def stop_journal(self) -> None:
        if self.journal is not None:
            self.journal.close()
            self.journal = None

    def group(self, layer: int) -> SpillFile:
        if layer not in self.groups:
            self.groups[layer] = SpillFile(os.path.join(self.root, f"g{layer}.kv"), self.max_bytes)  # clean: owned by groups, closed by close()
        return self.groups[layer]

    def spill(self, layer: int, pages: Dict[int, bytes]) -> int:
        grp = self.group(layer)
        done = 0
        for pid, data in pages.items():
            if not grp.append(pid, data):
                grp.roll()
                if not grp.append(pid, data):
                    break
            done += 1
        return done

    def export(self, layer: int, path: str, compact: bool) -> int:
        out = open(path, "wb")  # clean: near miss, both branches close
        n = 0
        for pid in self.group(layer).offsets:
            n += out.write(self.group(layer).read(pid))
        if compact:
            out.truncate(n)
            out.close()
        else:
            out.write(b"\0" * 8)
            out.close()
        return n

    def compare(self, a: str, b: str) -> bool:
        left = open(a, "rb")  # leak: a missing second file returns False and left stays open
        try:
            right = open(b, "rb")  # clean: closed below
        except FileNotFoundError:
            return False
        same = left.read() == right.read()
        right.close()
        left.close()
        return same

    def close(self) -> None:
        for grp in self.groups.values():
            grp.close()
        self.groups.clear()
        self.stop_journal()


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        seg = os.path.join(root, "s.kv")
        write_segment(seg, [b"abc", b"defgh"])
        assert segment_page_count(seg) == 2
        assert first_page(seg) == b"abc"
        assert list(iter_pages(seg)) == [b"abc", b"defgh"]  # clean: read to the end, and the generator closes
        assert list(iter_lengths(seg, 5)) == [3, 5]  # clean: read to the end, the fault is in the generator
        assert segment_size(seg) > 0
        tier = SpillTier(root)
        tier.start_journal("j")
        tier.spill(0, {1: b"x" * 10, 2: b"y" * 20})
        tier.export(0, os.path.join(root, "e"), True)
        assert not tier.compare(seg, os.path.join(root, "e"))
        assert load_index(os.path.join(root, "none")) == {} and load_index_lenient(os.path.join(root, "none")) == {}
        tier.close()


if __name__ == "__main__":
    main()
