"""Several trainer processes of one node consume a shared list of shards.

Ownership of a shard is a lock file, progress a small journal. Threads inside the
process share one `ReaderSlots` so that not too many shards are open at a time.
"""
from __future__ import annotations

import json
import os
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Iterator, List, Optional, TextIO

import torch


class ReaderSlots:
    """Counting gate with named holders."""

    def __init__(self, n: int):
        self._free = n
        self._cv = threading.Condition(threading.Lock())

    def enter(self) -> None:
        with self._cv:  # clean: with block
            while self._free == 0:
                self._cv.wait()
            self._free -= 1  # clean: the caller's until leave()

    def try_enter(self) -> bool:
        with self._cv:  # clean: with block
            if self._free == 0:
                return False
            self._free -= 1  # clean: the caller's until leave()
            return True

    def leave(self) -> None:
        with self._cv:  # clean: with block
            self._free += 1
            self._cv.notify()


@dataclass
class Claim:
    shard: Path
    fd: int

    def abandon(self) -> None:
        os.close(self.fd)
        os.unlink(self.shard.with_suffix(".lock"))


def claim_shard(shard: Path) -> Optional[Claim]:
    try:
        fd = os.open(shard.with_suffix(".lock"), os.O_CREAT | os.O_EXCL | os.O_WRONLY)  # clean: near miss, nothing is open when it exists already, else it is in the Claim
    except FileExistsError:
        return None
    os.write(fd, str(os.getpid()).encode())
    return Claim(shard, fd)


def append_journal(path: Path, record: dict) -> None:
    with open(path, "a") as fh:  # clean: with block
        fh.write(json.dumps(record) + "\n")


def last_record(path: Path) -> Optional[dict]:
    fh = open(path)  # leak: an empty journal returns None before close
    lines = fh.readlines()
    if not lines:
        return None
    fh.close()
    return json.loads(lines[-1])


class ShardConsumer:
    def __init__(self, shards: List[Path], slots: ReaderSlots, journal: Path):
        self.shards = shards
        self.slots = slots
        self.journal = journal
        self._mine: Dict[str, Claim] = {}
        self._log: Optional[TextIO] = None
        self._step_lock = threading.RLock()

    def next_claim(self) -> Optional[Claim]:
        for shard in self.shards:
            claim = claim_shard(shard)  # leak: finished shards are skipped with the claim still held
            if claim is None:
                continue
            if shard.with_suffix(".done").exists():
                continue
            self._mine[shard.name] = claim
            return claim
        return None

    def claim_next_unfinished(self) -> Optional[Claim]:
        for shard in self.shards:
            claim = claim_shard(shard)  # clean: near miss, abandoned for finished shards, else kept for close()
            if claim is None:
                continue
            if shard.with_suffix(".done").exists():
                claim.abandon()
                continue
            self._mine[shard.name] = claim
            return claim
        return None

    def consume(self, claim: Claim, limit: int) -> Iterator[torch.Tensor]:
        self.slots.enter()  # clean: near miss, left in the finally also when the limit ends the loop
        try:
            for i, t in enumerate(torch.load(claim.shard, map_location="cpu")):
                if i == limit:
                    return
                yield t
        finally:
            self.slots.leave()

    def finish(self, claim: Claim) -> None:
        with self._step_lock:  # clean: with block
            claim.shard.with_suffix(".done").touch()
            append_journal(self.journal, {"shard": claim.shard.name})
            self._mine.pop(claim.shard.name, None)
            claim.abandon()

    def open_log(self, path: Path) -> None:
        if self._log is not None:
            self._log.close()
        self._log = open(path, "a")  # clean: near miss, the previous one was closed, close() closes this one

    def peek(self, shard: Path) -> Optional[torch.Size]:
        if not self.slots.try_enter():  # leak: an empty shard returns None without leave
            return None
        data = torch.load(shard, map_location="cpu")
        if len(data) == 0:
            return None
        shape = data[0].shape
        self.slots.leave()
        return shape

    def sizes(self) -> Dict[str, int]:
        out: Dict[str, int] = {}
        for shard in self.shards:
            if not self.slots.try_enter():  # clean: near miss, the continue is taken only without a slot
                out[shard.name] = -1
                continue
            try:
                out[shard.name] = len(torch.load(shard, map_location="cpu"))
            finally:
                self.slots.leave()
        return out

    def bump(self, by: int) -> int:
        self._step_lock.acquire()  # leak: zero or negative increments return with the lock held
        rec = last_record(self.journal) or {"step": 0}
        if by <= 0:
            return rec["step"]
        rec["step"] += by
        append_journal(self.journal, rec)
        self._step_lock.release()
        return rec["step"]

    def close(self) -> None:
        for claim in self._mine.values():
            claim.abandon()
        self._mine.clear()
        if self._log is not None:
            self._log.close()
            self._log = None


def rewrite_journal(path: Path, keep: int) -> None:
    fd, tmp = tempfile.mkstemp(dir=path.parent)  # leak: the descriptor stays open when the journal is short enough
    lines = path.read_text().splitlines()
    if len(lines) <= keep:
        os.unlink(tmp)
        return
    with os.fdopen(fd, "w") as out:  # clean: with block
        out.write("\n".join(lines[-keep:]) + "\n")
    os.replace(tmp, path)
