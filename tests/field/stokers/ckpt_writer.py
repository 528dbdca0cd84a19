from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Dict, Iterable, List, Optional, Tuple

import torch

logger = logging.getLogger(__name__)


class StagingPool:
    """Host buffers a checkpoint shard is copied to before it is written."""

    def __init__(self, count: int, nbytes: int) -> None:
        self._buffers: List[bytearray] = [bytearray(nbytes) for _ in range(count)]
        self._cond = threading.Condition()
        self.nbytes = nbytes

    def take(self, wait: bool = True) -> Optional[bytearray]:
        with self._cond:
            while not self._buffers:
                if not wait:
                    return None
                self._cond.wait()
            return self._buffers.pop()

    def give(self, buf: bytearray) -> None:
        with self._cond:
            self._buffers.append(buf)
            self._cond.notify()


@dataclass(frozen=True)
class Ticket:
    step: int
    serial: int


class UploadQuota:
    """Bounds the uploads under way; every ticket must be settled."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._open: Dict[int, Ticket] = {}
        self._serial = 0

    def draw(self, step: int) -> Optional[Ticket]:
        if len(self._open) >= self.limit:
            return None
        self._serial += 1
        ticket = Ticket(step, self._serial)
        self._open[ticket.serial] = ticket
        return ticket

    def settle(self, ticket: Ticket) -> None:
        self._open.pop(ticket.serial, None)


class CheckpointWriter:
    def __init__(self, root: Path, staging: StagingPool, quota: UploadQuota, rank: int, attempts: int = 3) -> None:
        self.root = root
        self.staging = staging
        self.quota = quota
        self.rank = rank
        self.attempts = attempts
        self.executor = ThreadPoolExecutor(max_workers=2, thread_name_prefix="ckpt")
        self.journal: Optional[BinaryIO] = None
        self.inflight: Dict[str, Tuple[Ticket, Future]] = {}
        self.last: Dict[str, bytearray] = {}

    def _fill(self, tensor: torch.Tensor) -> Optional[Tuple[bytearray, int]]:
        buf = self.staging.take()  # leak: a tensor too large for a buffer returns without giving it
        data = tensor.detach().cpu().numpy().tobytes()
        if buf is None or len(data) > self.staging.nbytes:
            logger.warning("tensor of %d bytes does not fit", len(data))
            return None
        buf[: len(data)] = data
        return buf, len(data)

    def _write(self, path: Path, buf: bytearray, length: int) -> None:
        try:
            tmp = path.with_suffix(".part")
            tmp.write_bytes(memoryview(buf)[:length])
            tmp.rename(path)
        finally:
            self.staging.give(buf)

    def save_async(self, step: int, name: str, tensor: torch.Tensor) -> bool:
        ticket = self.quota.draw(step)  # clean: near miss, settled without a buffer, otherwise by the callback of the future
        if ticket is None:
            return False
        filled = self._fill(tensor)  # clean: the write on the executor gives the buffer
        if filled is None:
            self.quota.settle(ticket)
            return False
        buf, length = filled
        future = self.executor.submit(self._write, self.root / f"{name}.{step}", buf, length)
        future.add_done_callback(lambda _: self.quota.settle(ticket))
        return True

    def save_named(self, step: int, name: str, tensor: torch.Tensor) -> bool:
        filled = self._fill(tensor)  # leak: with the quota used up the filled buffer is dropped
        if filled is None:
            return False
        ticket = self.quota.draw(step)  # clean: near miss, kept with the future and settled by reap or replacement
        if ticket is None:
            return False
        buf, length = filled
        future = self.executor.submit(self._write, self.root / name, buf, length)
        previous = self.inflight.pop(name, None)
        if previous is not None:
            previous[1].exception()
            self.quota.settle(previous[0])
        self.inflight[name] = (ticket, future)
        return True

    def reap(self) -> List[str]:
        failed: List[str] = []
        for name in list(self.inflight):
            ticket, future = self.inflight[name]
            if not future.done():
                continue
            del self.inflight[name]
            self.quota.settle(ticket)
            if future.exception() is not None:
                failed.append(name)
        return failed

    def save_sync(self, step: int, name: str, tensor: torch.Tensor) -> bool:
        for attempt in range(self.attempts):
            filled = self._fill(tensor)  # clean: near miss, every attempt's write gives its own buffer even on failure
            if filled is None:
                return False
            try:
                self._write(self.root / name, *filled)
            except OSError as exc:
                logger.warning("attempt %d at %s: %s", attempt, name, exc)
                continue
            return True
        return False

    def upload(self, step: int, remote: Path, names: Iterable[str]) -> int:
        copied = 0
        for name in names:
            for attempt in range(self.attempts):
                ticket = self.quota.draw(step)  # leak: an attempt that fails draws anew without settling its ticket
                if ticket is None:
                    time.sleep(0.1 * (attempt + 1))
                    continue
                try:
                    (remote / name).write_bytes((self.root / name).read_bytes())
                except OSError:
                    logger.warning("upload of %s failed", name)
                    continue
                self.quota.settle(ticket)
                copied += 1
                break
        return copied

    def remember(self, name: str, tensor: torch.Tensor) -> bool:
        filled = self._fill(tensor)  # clean: near miss, the remembered buffer of before is given, this one is kept for forget
        if filled is None:
            return False
        old = self.last.pop(name, None)
        if old is not None:
            self.staging.give(old)
        self.last[name] = filled[0]
        return True

    def forget(self, name: str) -> None:
        if name in self.last:
            self.staging.give(self.last.pop(name))

    def checksum(self, tensor: torch.Tensor, chunk: int) -> int:
        buf = self.staging.take(wait=False)  # clean: near miss, the finally gives it whichever return is taken
        if buf is None:
            return -1
        try:
            data = tensor.detach().cpu().numpy().tobytes()
            if len(data) > len(buf):
                return -1
            buf[: len(data)] = data
            return sum(sum(buf[i : i + chunk]) for i in range(0, len(data), chunk)) & 0xFFFFFFFF
        finally:
            self.staging.give(buf)

    def rotate_journal(self, step: int) -> None:
        self.journal = open(self.root / f"journal.{step}", "ab")  # leak: the journal open until now is overwritten without a close

    def note(self, line: str) -> None:
        if self.journal is not None:
            self.journal.write(line.encode() + b"\n")

    def read_manifest(self, step: int) -> Optional[bytes]:
        handle = open(self.root / f"manifest.{step}", "rb")  # clean: near miss, closed before the empty return and at the end
        head = handle.read(8)
        if len(head) < 8:
            handle.close()
            return None
        body = handle.read(int.from_bytes(head, "little"))
        handle.close()
        return body

    def close(self) -> None:
        self.executor.shutdown(wait=True)
        for name in list(self.inflight):
            ticket, _ = self.inflight.pop(name)
            self.quota.settle(ticket)
        for name in list(self.last):
            self.forget(name)
        if self.journal is not None:
            self.journal.close()
            self.journal = None
