"""Asynchronous copies through staging buffers."""
from __future__ import annotations

from collections import deque
from typing import Deque, Iterable, Iterator, List, Optional, Tuple

import torch

from .pool import BufferSource, StagingBuffer


class CopyEngine:
    """Issues non-blocking copies; a buffer is restored once its event has passed."""

    def __init__(self, source: BufferSource, stream):
        self.source = source
        self.stream = stream
        self._inflight: Deque[Tuple[object, StagingBuffer]] = deque()
        self._deferred: List[StagingBuffer] = []

    def stage(self, payload: bytes) -> Optional[StagingBuffer]:
        """Copy the payload into a buffer that the caller must submit or restore."""
        buf = self.source.lend(len(payload))  # clean: handed to the caller
        if buf is None:
            return None
        buf.data[:len(payload)].copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        return buf

    def submit(self, buf: StagingBuffer, dst: torch.Tensor) -> None:
        with torch.cuda.stream(self.stream):
            dst[:buf.used].copy_(buf.data[:buf.used], non_blocking=True)
            event = torch.cuda.Event()
            event.record(self.stream)
        self._inflight.append((event, buf))

    def reap(self) -> int:
        done = 0
        while self._inflight and self._inflight[0][0].query():
            _, buf = self._inflight.popleft()
            self.source.restore(buf)
            done += 1
        return done

    def drain(self) -> None:
        while self._inflight:
            event, buf = self._inflight.popleft()
            event.synchronize()
            self.source.restore(buf)

    def send(self, payload: bytes, dst: torch.Tensor) -> bool:
        buf = self.stage(payload)  # clean: near miss, submit moves it to _inflight and reap restores it
        if buf is None:
            self.reap()
            return False
        self.submit(buf, dst)
        return True

    def send_checked(self, payload: bytes, dst: torch.Tensor) -> bool:
        buf = self.stage(payload)  # leak: a destination that is too short returns with the buffer
        if buf is None:
            return False
        if dst.numel() < buf.used:
            return False
        self.submit(buf, dst)
        return True

    def send_with_retry(self, payload: bytes, dst: torch.Tensor, attempts: int = 3) -> bool:
        for attempt in range(attempts):
            buf = self.stage(payload)  # leak: a checksum mismatch starts another attempt with a new buffer
            if buf is None:
                self.drain()
                continue
            if _adler(buf) != _adler_of(payload):
                continue
            self.submit(buf, dst)
            return True
        return False

    def defer(self, payload: bytes) -> bool:
        buf = self.stage(payload)  # clean: near miss, parked in _deferred until flush_deferred submits it
        if buf is None:
            return False
        self._deferred.append(buf)
        return True

    def flush_deferred(self, dst: torch.Tensor) -> None:
        parked, self._deferred = self._deferred, []
        for buf in parked:
            self.submit(buf, dst)


def _adler(buf: StagingBuffer) -> int:
    return int(buf.data[:buf.used].to(torch.int64).sum()) & 0xFFFFFFFF


def _adler_of(payload: bytes) -> int:
    return sum(payload) & 0xFFFFFFFF


def stream_blocks(engine: CopyEngine, payloads: Iterable[bytes]) -> Iterator[StagingBuffer]:
    """Yield filled buffers; the consumer submits each of them."""
    for payload in payloads:
        buf = engine.stage(payload)  # clean: handed to the consumer of the generator
        if buf is not None:
            yield buf


def upload_all(engine: CopyEngine, payloads: Iterable[bytes], dst: torch.Tensor) -> int:
    sent = 0
    for buf in stream_blocks(engine, payloads):  # clean: every buffer is submitted
        offset = sent
        sent += buf.used
        engine.submit(buf, dst[offset:sent])
    engine.drain()
    return sent


def upload_until_full(engine: CopyEngine, payloads: Iterable[bytes], dst: torch.Tensor) -> int:
    sent = 0
    for buf in stream_blocks(engine, payloads):  # leak: the buffer at hand is dropped by the break
        if sent + buf.used > dst.numel():
            break
        engine.submit(buf, dst[sent:sent + buf.used])
        sent += buf.used
    engine.drain()
    return sent
