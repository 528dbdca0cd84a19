from __future__ import annotations

import logging
import os
import tempfile
from typing import Dict, List

from .files import SlottedFile, WriterSlots
from .store import CheckpointStore

log = logging.getLogger("ckptstore")


def save_streamed(store: CheckpointStore, tensors: Dict[str, List[bytes]]) -> List[str]:
    """Opens all shards first, then writes round-robin."""
    for name in tensors:
        if not store.begin(name):  # clean: near miss, ended below or rolled back
            store.rollback()
            return []
    for name, chunks in tensors.items():
        for c in chunks:
            store.append(name, c)
    done = []
    for name in tensors:
        store.end(name)
        done.append(name)
    return done


def save_replicas(slots: WriterSlots, paths: List[str], data: bytes, quorum: int) -> bool:
    files: List[SlottedFile] = []
    for p in paths:
        f = SlottedFile.create(slots, p)  # leak: below the quorum the list is dropped undiscarded
        if f is not None:
            files.append(f)
    if len(files) < quorum:
        log.warning("only %d of %d replicas writable", len(files), quorum)
        return False
    for f in files:
        f.inner.write(data)
        f.commit()
    return True


def main() -> None:
    slots = WriterSlots(4)
    with tempfile.TemporaryDirectory() as root:
        store = CheckpointStore(root, slots)
        print(store.put("a.bin", b"abc"), save_streamed(store, {"b.bin": [b"x", b"y"], "c.bin": [b"z"]}))
        print(save_replicas(slots, [os.path.join(root, f"r{i}") for i in range(2)], b"data", 2))
        print(store.put_unless_same("a.bin", b"abcd"), store.write_manifest(["a.bin", "b.bin"]), store.verify({"zz": "0"}), slots.open)


if __name__ == "__main__":
    main()
