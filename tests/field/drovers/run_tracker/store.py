"""Run directories: create, read back, compare."""
import json
import logging
import os
from typing import Dict, IO, Iterator, List, Optional

from .locks import LockTable, PidFile
from .writer import MetricWriter

log = logging.getLogger(__name__)


def open_part(path: str) -> IO[str]:
    return open(path)  # clean: handed to the caller


def open_first(paths: List[str]) -> Optional[IO[str]]:
    """The first part that is not empty."""
    for path in paths:
        fh = open_part(path)  # leak: empty parts are passed over while open
        if fh.read(1):
            fh.seek(0)
            return fh
    return None


class RunStore:
    def __init__(self, root: str):
        self.root = root
        self.locks = LockTable()
        self._writers: Dict[str, MetricWriter] = {}

    def _parts(self, run: str) -> List[str]:
        d = os.path.join(self.root, run)
        return [os.path.join(d, f) for f in sorted(os.listdir(d)) if f.endswith(".jsonl")]

    def create(self, run: str) -> MetricWriter:
        self.locks.enter(run)  # clean: left in finally
        try:
            if run not in self._writers:
                os.makedirs(os.path.join(self.root, run), exist_ok=True)
                self._writers[run] = MetricWriter(os.path.join(self.root, run))
            return self._writers[run]
        finally:
            self.locks.leave(run)

    def finish(self, run: str) -> bool:
        if self.locks.enter_nowait(run) is None:  # clean: near miss, None means that there is nothing to leave
            return False
        w = self._writers.pop(run, None)
        if w is not None:
            w.close()
        self.locks.leave(run)
        return True

    def rename(self, old: str, new: str) -> bool:
        self.locks.enter(old)  # leak: not left when the new name is taken by another thread
        if self.locks.enter_nowait(new) is None:  # clean: left at the end
            return False
        os.rename(os.path.join(self.root, old), os.path.join(self.root, new))
        self.locks.leave(new)
        self.locks.leave(old)
        return True

    def annotate(self, run: str, note: str) -> None:
        with PidFile(os.path.join(self.root, run)):  # clean: with statement
            with open(os.path.join(self.root, run, "notes.txt"), "a") as fh:  # clean: with statement
                fh.write(note + "\n")

    def rows(self, run: str) -> Iterator[dict]:
        for path in self._parts(run):
            fh = open_part(path)  # clean: near miss, the finally closes it even when the reader stops early
            try:
                for line in fh:
                    yield json.loads(line)
            finally:
                fh.close()

    def tail(self, run: str, n: int) -> List[str]:
        parts = self._parts(run)
        if not parts:
            return []
        return open_part(parts[-1]).readlines()[-n:]  # leak: the lines are copied and the file dropped

    def bad_lines(self, run: str) -> int:
        bad = 0
        for path in self._parts(run):
            fh = open_part(path)  # leak: a part with a malformed line is survived while open
            try:
                for line in fh:
                    json.loads(line)
            except ValueError:
                bad += 1
                log.info("malformed line in %s", path)
            else:
                fh.close()
        return bad

    def header(self, run: str) -> Optional[dict]:
        fh = open_first(self._parts(run))  # clean: closed after the read
        if fh is None:
            return None
        line = fh.readline()
        fh.close()
        return json.loads(line)
