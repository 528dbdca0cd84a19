"""Tokenizer worker processes behind a handle table with generations."""
from __future__ import annotations

import json
import logging
import os
import subprocess
import tempfile
from dataclasses import dataclass
from typing import IO, NamedTuple, Optional

log = logging.getLogger("tok")


class Ticket(NamedTuple):
    index: int
    generation: int


@dataclass
class Slot:
    proc: "subprocess.Popen[str]"
    generation: int = 0
    busy: bool = False
    next_free: int = -1


class TokenizerTable:
    """Free slots are chained by index; tickets carry the generation to catch stale use."""

    def __init__(self, cmd: list[str], count: int) -> None:
        self._slots: list[Slot] = []
        self._first_free = -1
        for i in range(count):
            proc = subprocess.Popen(cmd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # clean: in the slot, shutdown ends each one
            self._slots.append(Slot(proc, next_free=self._first_free))
            self._first_free = i

    def rent(self) -> Optional[Ticket]:
        i = self._first_free
        if i < 0:
            return None
        slot = self._slots[i]
        self._first_free = slot.next_free  # clean: the index goes out in the ticket
        slot.busy = True
        return Ticket(i, slot.generation)

    def unrent(self, t: Ticket) -> None:
        slot = self._slots[t.index]
        if slot.generation != t.generation:
            return
        slot.generation += 1
        slot.busy = False
        slot.next_free = self._first_free
        self._first_free = t.index

    def ask(self, t: Ticket, text: str) -> Optional[list[int]]:
        proc = self._slots[t.index].proc
        if proc.stdin is None or proc.stdout is None or proc.poll() is not None:
            return None
        proc.stdin.write(json.dumps(text) + "\n")
        proc.stdin.flush()
        return json.loads(proc.stdout.readline())

    def shutdown(self) -> None:
        for slot in self._slots:
            slot.proc.terminate()
            slot.proc.wait()


class Encoder:
    def __init__(self, table: TokenizerTable) -> None:
        self.table = table
        self.streams: dict[str, Ticket] = {}

    def encode(self, text: str) -> list[int]:
        t = self.table.rent()  # leak: a dead process raises with the ticket still rented
        if t is None:
            return self._slow(text)
        ids = self.table.ask(t, text)
        if ids is None:
            raise RuntimeError(f"tokenizer {t.index} died")
        self.table.unrent(t)
        return ids

    def encode_many(self, texts: list[str]) -> list[list[int]]:
        t = self.table.rent()  # clean: near miss, the slow path inside the loop does not leave it
        if t is None:
            return [self._slow(x) for x in texts]
        out = []
        for x in texts:
            ids = self.table.ask(t, x)
            if ids is None:
                out.append(self._slow(x))
                continue
            out.append(ids)
        self.table.unrent(t)
        return out

    def encode_first(self, texts: list[str]) -> Optional[list[int]]:
        for x in texts:
            t = self.table.rent()  # leak: the break on a non-empty answer skips the unrent
            if t is None:
                return None
            ids = self.table.ask(t, x)
            if ids:
                break
            self.table.unrent(t)
        else:
            return None
        return ids

    def open_stream(self, key: str) -> bool:
        if key in self.streams:
            return False
        t = self.table.rent()  # clean: kept under its key, close_stream unrents
        if t is None:
            return False
        self.streams[key] = t
        return True

    def reset_stream(self, key: str) -> bool:
        t = self.table.rent()  # clean: near miss, the popped old ticket is unrented
        if t is None:
            return False
        old = self.streams.pop(key, None)
        if old is not None:
            self.table.unrent(old)
        self.streams[key] = t
        return True

    def close_stream(self, key: str) -> None:
        t = self.streams.pop(key, None)
        if t is not None:
            self.table.unrent(t)

    def _slow(self, text: str) -> list[int]:
        return list(text.encode())


def dump_vocab(cmd: list[str], path: str) -> bool:
    out = open(path, "w")  # clean: near miss, closed before either return
    proc = subprocess.run(cmd, stdout=out)
    out.close()
    if proc.returncode != 0:
        os.unlink(path)
        return False
    return True


def spill_text(texts: list[str], limit: int) -> Optional[IO[str]]:
    fh = tempfile.TemporaryFile("w+")  # leak: beyond the limit None is returned and the file left open
    size = 0
    for t in texts:
        size += fh.write(t)
        if size > limit:
            return None
    fh.seek(0)
    return fh


def count_spilled(texts: list[str]) -> int:
    fh = spill_text(texts, 1 << 20)  # clean: closed when there is one
    if fh is None:
        return -1
    n = sum(1 for _ in fh)
    fh.close()
    return n


def liveness(table: TokenizerTable, tries: int) -> int:
    alive = 0
    for _ in range(tries):
        t = table.rent()  # leak: only tickets that answered are unrented
        if t is None:
            break
        if table.ask(t, "ping") is not None:
            alive += 1
            table.unrent(t)
    return alive
