"""Sharded checkpoint writer: staging leases, shard files and a manifest."""
from __future__ import annotations

import json
import logging
import os
import queue
import struct
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Iterator

logger = logging.getLogger(__name__)

MAGIC = b"SHRD"


class Lease:
    def __init__(self, pool: "StagingPool", block: bytearray) -> None:
        self.pool = pool
        self.block = block
        self.length = 0

    def write(self, payload: bytes) -> bool:
        if len(payload) > len(self.block):
            return False
        self.block[: len(payload)] = payload
        self.length = len(payload)
        return True

    def end(self) -> None:
        self.pool.end_lease(self)


class StagingPool:
    def __init__(self, count: int, nbytes: int) -> None:
        self._blocks: queue.Queue[bytearray] = queue.Queue()
        for _ in range(count):
            self._blocks.put(bytearray(nbytes))

    def lease(self) -> Lease:
        return Lease(self, self._blocks.get())

    def end_lease(self, lease: Lease) -> None:
        self._blocks.put(lease.block)

    @property
    def idle(self) -> int:
        return self._blocks.qsize()


@dataclass
class Shard:
    name: str
    tensors: dict[str, bytes] = field(default_factory=dict)


class CheckpointWriter:
    def __init__(self, root: Path, staging: StagingPool) -> None:
        self.root = root
        self.staging = staging
        self.jobs: queue.Queue[tuple[str, Lease] | None] = queue.Queue()
        self._journal: IO[str] | None = None
        self._files: dict[str, IO[bytes]] = {}
        self._thread: threading.Thread | None = None

    # journal

    def open_journal(self) -> None:
        if self._journal is None:
            self._journal = open(self.root / "journal.txt", "a")  # clean: held by the writer, close() closes it

    def rotate_journal(self) -> None:
        os.replace(self.root / "journal.txt", self.root / "journal.old")
        if self._journal is not None:
            self._journal.close()
        self._journal = open(self.root / "journal.txt", "a")  # clean: near miss, the former file is closed first

    def note(self, text: str) -> None:
        if self._journal is not None:
            self._journal.write(text + "\n")

    # shards

    def write_shard(self, shard: Shard) -> int:
        path = self.root / f"{shard.name}.bin"
        f = open(path, "wb")  # leak: an empty shard returns 0 with the file open
        f.write(MAGIC)
        if not shard.tensors:
            return 0
        written = 0
        for name, payload in sorted(shard.tensors.items()):
            f.write(struct.pack("<I", len(payload)))
            written += f.write(payload)
        f.close()
        self.note(f"{shard.name} {written}")
        return written

    def write_manifest(self, shards: list[Shard]) -> None:
        tmp = self.root / "manifest.tmp"
        with open(tmp, "w") as f:  # clean: scoped by the with
            json.dump({s.name: sorted(s.tensors) for s in shards}, f)
        os.replace(tmp, self.root / "manifest.json")

    def read_manifest(self) -> dict[str, list[str]]:
        path = self.root / "manifest.json"
        if not path.exists():
            return {}
        return json.load(open(path))  # leak: the file object is dropped after the load

    def valid(self, name: str) -> bool:
        try:
            f = open(self.root / f"{name}.bin", "rb")  # clean: near miss, closed in the finally; nothing is open in the except
        except FileNotFoundError:
            return False
        try:
            return f.read(4) == MAGIC
        finally:
            f.close()

    def shard_file(self, name: str) -> IO[bytes]:
        f = self._files.get(name)
        if f is None:
            f = open(self.root / f"{name}.part", "ab")  # clean: near miss, kept in the table that close() empties
            self._files[name] = f
        return f

    def append(self, name: str, payload: bytes) -> None:
        self.shard_file(name).write(payload)  # clean: the file belongs to the table

    def seal(self, name: str) -> None:
        f = self._files.pop(name, None)
        if f is not None:
            f.close()
            os.replace(self.root / f"{name}.part", self.root / f"{name}.bin")

    def copy_tensor(self, src: Path, dst: Path, limit: int) -> bool:
        fin = open(src, "rb")  # leak: the size check returns before both closes
        fout = open(dst, "wb")  # leak: the same return leaves the output open
        data = fin.read()
        if len(data) > limit:
            logger.warning("%s is over the limit", src)
            return False
        fout.write(data)
        fout.close()
        fin.close()
        return True

    # asynchronous part

    def submit(self, shard: Shard) -> int:
        queued = 0
        for name, payload in shard.tensors.items():
            lease = self.staging.lease()  # leak: a payload that does not fit is skipped with the lease held
            if not lease.write(payload):
                logger.warning("%s does not fit into staging", name)
                continue
            self.jobs.put((f"{shard.name}.{name}", lease))
            queued += 1
        return queued

    def submit_one(self, name: str, payload: bytes) -> bool:
        lease = self.staging.lease()  # clean: near miss, ended here or by the worker that takes the job
        if lease.write(payload):
            self.jobs.put((name, lease))
            return True
        lease.end()
        return False

    def _drain(self) -> None:
        while True:
            job = self.jobs.get()
            if job is None:
                return
            name, lease = job
            try:
                with open(self.root / name, "wb") as f:  # clean: scoped by the with
                    f.write(lease.block[: lease.length])
            except OSError as exc:
                logger.error("%s: %s", name, exc)
            finally:
                lease.end()

    def start(self) -> None:
        self._thread = threading.Thread(target=self._drain, daemon=True)
        self._thread.start()

    def checksum(self, shard: Shard) -> int:
        total = 0
        for payload in shard.tensors.values():
            lease = self.staging.lease()  # clean: ended in the finally of each round, the break included
            try:
                if not lease.write(payload):
                    break
                total = (total + sum(lease.block[: lease.length])) & 0xFFFFFFFF
            finally:
                lease.end()
        return total

    def dry_run(self, shard: Shard) -> list[str]:
        leases = {name: self.staging.lease() for name in shard.tensors}  # leak: entries that fitted are ended, the others are not
        failed = []
        for name, lease in leases.items():
            if lease.write(shard.tensors[name]):
                lease.end()
            else:
                failed.append(name)
        return failed

    def close(self) -> None:
        if self._thread is not None:
            self.jobs.put(None)
            self._thread.join()
        for name in list(self._files):
            self.seal(name)
        if self._journal is not None:
            self._journal.close()
            self._journal = None


def iter_records(path: Path) -> Iterator[bytes]:
    f = open(path, "rb")  # leak: a bad magic ends the generator before the try
    if f.read(4) != MAGIC:
        return
    try:
        while True:
            head = f.read(4)
            if len(head) < 4:
                break
            yield f.read(struct.unpack("<I", head)[0])
    finally:
        f.close()
