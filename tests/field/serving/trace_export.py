"""Request traces and metrics: files, rotated by size, and a small pool of encoders."""
import atexit
import gzip
import json
import logging
import os
import threading
import time
from typing import IO, Any, Dict, Iterable, List, Optional

logger = logging.getLogger(__name__)


class Encoder:
    def __init__(self) -> None:
        self.rows: List[str] = []

    def add(self, event: Dict[str, Any]) -> None:
        self.rows.append(json.dumps(event))

    def dump(self) -> str:
        out, self.rows = "\n".join(self.rows), []
        return out


class EncoderPool:
    def __init__(self, n: int = 4) -> None:
        self._free = [Encoder() for _ in range(n)]
        self._all = n

    def checkout_encoder(self) -> Encoder:
        if not self._free:
            self._free.append(Encoder())
            self._all += 1
        return self._free.pop()

    def checkin_encoder(self, enc: Encoder) -> None:
        enc.rows.clear()
        self._free.append(enc)


class TraceWriter:
    def __init__(self, path: str, pool: EncoderPool, max_bytes: int = 1 << 20) -> None:
        self.path = path
        self.pool = pool
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self.fh: IO[str] = open(path, "a", encoding="utf-8")  # clean: closed in close and on rotation
        self.index: Optional[IO[str]] = None
        atexit.register(self.close)

    def rotate(self) -> None:
        self.fh.close()
        os.replace(self.path, f"{self.path}.{int(time.time())}")
        self.fh = open(self.path, "a", encoding="utf-8")  # clean: near miss, the old one was closed first

    def open_index(self, path: str) -> None:
        self.index = open(path, "w", encoding="utf-8")  # leak: close never touches the index

    def write(self, events: Iterable[Dict[str, Any]]) -> int:
        enc = self.pool.checkout_encoder()  # clean: checked in at the end
        n = 0
        for e in events:
            if "rid" not in e:
                continue
            enc.add(e)
            n += 1
        text = enc.dump()
        self.pool.checkin_encoder(enc)
        with self._lock:
            self.fh.write(text + "\n")
            if self.fh.tell() > self.max_bytes:
                self.rotate()
        return n

    def write_sampled(self, events: List[Dict[str, Any]], every: int) -> int:
        enc = self.pool.checkout_encoder()  # leak: nothing sampled, nothing checked in
        for e in events[::every]:
            enc.add(e)
        if not enc.rows:
            return 0
        n = len(enc.rows)
        self.fh.write(enc.dump())
        self.pool.checkin_encoder(enc)
        return n

    def write_locked(self, event: Dict[str, Any]) -> bool:
        if not self._lock.acquire(timeout=0.5):  # leak: an event without a kind returns with the lock held
            return False
        if event.get("kind") is None:
            logger.debug("event without kind: %s", event)
            return False
        self.fh.write(json.dumps(event))
        self._lock.release()
        return True

    def write_unbuffered(self, event: Dict[str, Any]) -> bool:
        got = self._lock.acquire(timeout=0.5)  # clean: near miss, the same variable guards the release
        try:
            if not got:
                return False
            self.fh.write(json.dumps(event))
            self.fh.flush()
            return True
        finally:
            if got:
                self._lock.release()

    def close(self) -> None:
        if not self.fh.closed:
            self.fh.close()


def compress(path: str, min_bytes: int = 0) -> Optional[str]:
    src = open(path, "rb")  # leak: a small file is left open
    data = src.read()
    if len(data) < min_bytes:
        return None
    dst = gzip.open(path + ".gz", "wb")  # clean: closed below
    dst.write(data)
    dst.close()
    src.close()
    return path + ".gz"


def tail(path: str, n: int) -> List[str]:
    f = open(path, encoding="utf-8")  # clean: near miss, closed before the early return and at the end
    lines = f.readlines()
    if len(lines) <= n:
        f.close()
        return lines
    out = lines[-n:]
    f.close()
    return out


def merge(paths: List[str], out: str) -> int:
    files = [open(p, encoding="utf-8") for p in paths]  # clean: every one is closed in the finally
    try:
        with open(out, "w", encoding="utf-8") as o:  # clean: with statement
            for f in files:
                o.writelines(f)
    finally:
        for f in files:
            f.close()
    return len(files)


def first_event(paths: List[str]) -> Optional[Dict[str, Any]]:
    for p in paths:
        f = open(p, encoding="utf-8")  # leak: the file with an event is returned from without a close
        line = f.readline()
        if line:
            return json.loads(line)
        f.close()
    return None


def spread(pool: EncoderPool, groups: Dict[str, List[Dict[str, Any]]]) -> Dict[str, str]:
    encs: Dict[str, Encoder] = {}
    for name in groups:
        encs[name] = pool.checkout_encoder()  # clean: near miss, the dict is emptied by popitem and each is checked in
    out: Dict[str, str] = {}
    while encs:
        name, enc = encs.popitem()
        for e in groups[name]:
            enc.add(e)
        out[name] = enc.dump()
        pool.checkin_encoder(enc)
    return out


def spread_nonempty(pool: EncoderPool, groups: Dict[str, List[Dict[str, Any]]]) -> Dict[str, str]:
    encs = {name: pool.checkout_encoder() for name in groups}  # leak: encoders of empty groups are deleted from the dict
    for name, events in groups.items():
        if not events:
            del encs[name]
    out: Dict[str, str] = {}
    for name, enc in encs.items():
        for e in groups[name]:
            enc.add(e)
        out[name] = enc.dump()
        pool.checkin_encoder(enc)
    return out
