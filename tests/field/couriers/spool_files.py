"""Spool directory of the batch scoring service: request bodies in, score files out."""
from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from typing import IO, Iterator


@dataclass
class SpoolEntry:
    name: str
    path: str
    size: int = 0


class SpoolReader:
    """Iterates over json lines; owns its file when asked to."""

    def __init__(self, fh: IO[str], owns: bool = True) -> None:
        self.fh = fh
        self.owns = owns

    def __iter__(self) -> Iterator[dict]:
        for line in self.fh:
            line = line.strip()
            if line:
                yield json.loads(line)

    def close(self) -> None:
        if self.owns:
            self.fh.close()


class Spool:
    def __init__(self, root: str, max_open: int = 32) -> None:
        self.root = root
        self.max_open = max_open
        self.writers: dict[str, IO[str]] = {}
        os.makedirs(root, exist_ok=True)

    def _path(self, name: str) -> str:
        return os.path.join(self.root, name + ".jsonl")

    def writer(self, tenant: str) -> IO[str]:
        fh = self.writers.get(tenant)
        if fh is None:
            fh = open(self._path(tenant), "a", encoding="utf-8")  # clean: near miss, kept in writers until close_all
            self.writers[tenant] = fh
        return fh

    def rotate(self, tenant: str, generation: int) -> None:
        name = "%s.%d" % (tenant, generation)
        self.writers[tenant] = open(self._path(name), "a", encoding="utf-8")  # leak: overwrites the open writer of the previous generation

    def close_all(self) -> None:
        while self.writers:
            _, fh = self.writers.popitem()
            fh.close()

    def reader(self, name: str) -> SpoolReader | None:
        path = self._path(name)
        if not os.path.exists(path):
            return None
        return SpoolReader(open(path, encoding="utf-8"))  # clean: the reader owns it and goes to the caller

    def peek_header(self, name: str) -> dict | None:
        fh = open(self._path(name), encoding="utf-8")  # leak: left open when the first line is not a header
        first = fh.readline()
        if not first.startswith("{"):
            return None
        fh.close()
        return json.loads(first)


class ScoreJob:
    def __init__(self, spool: Spool, model) -> None:
        self.spool = spool
        self.model = model
        self.failed: list[str] = []

    def count_rows(self, name: str) -> int:
        reader = self.spool.reader(name)  # clean: closed below, None checked
        if reader is None:
            return 0
        n = sum(1 for _ in reader)
        reader.close()
        return n

    def score(self, name: str) -> str | None:
        reader = self.spool.reader(name)  # clean: closed in finally
        if reader is None:
            return None
        out = tempfile.NamedTemporaryFile("w", delete=False, suffix=".scores")  # clean: near miss, closed in the same finally before the rename
        try:
            for row in reader:
                out.write(json.dumps({"id": row["id"], "score": self.model(row)}) + "\n")
        finally:
            reader.close()
            out.close()
        target = os.path.join(self.spool.root, name + ".scores")
        shutil.move(out.name, target)
        return target

    def first_match(self, names: list[str], key: str) -> dict | None:
        for name in names:
            reader = self.spool.reader(name)  # leak: returns the matching row without closing the reader
            if reader is None:
                continue
            for row in reader:
                if row.get("key") == key:
                    return row
            reader.close()
        return None

    def tail(self, path: str, limit: int) -> list[str]:
        fh = open(path, encoding="utf-8")  # leak: rebound to the file of the previous day without close
        if os.path.getsize(path) == 0 and os.path.exists(path + ".1"):
            fh = open(path + ".1", encoding="utf-8")  # clean: closed after reading
        lines = fh.readlines()[-limit:]
        fh.close()
        return lines

    def merge(self, parts: list[str], target: str) -> int:
        total = 0
        with open(target, "w", encoding="utf-8") as out:  # clean: with block
            for part in parts:
                src = open(part, encoding="utf-8")  # clean: closed on both arms
                if os.path.getsize(part) == 0:
                    src.close()
                    continue
                for line in src:
                    out.write(line)
                    total += 1
                src.close()
        return total

    def borrow_stdin(self, fh: IO[str]) -> list[dict]:
        reader = SpoolReader(fh, owns=False)
        rows = list(reader)
        reader.close()
        return rows

    def replay(self, entry: SpoolEntry) -> int:
        body = open(entry.path, encoding="utf-8")  # leak: wrapped with owns=False, so close() leaves it open
        reader = SpoolReader(body, owns=False)
        done = 0
        for row in reader:
            self.model(row)
            done += 1
        reader.close()
        return done
