"""Shared-memory channel between the engine and its detokenizer process."""
from __future__ import annotations

import asyncio
import logging
import struct
from collections import deque
from dataclasses import dataclass
from multiprocessing import Lock
from multiprocessing.shared_memory import SharedMemory

logger = logging.getLogger(__name__)

HEADER = struct.Struct("<IIQ")


@dataclass
class Segment:
    index: int
    view: memoryview
    length: int = 0


class SegmentRing:
    """Equal segments of one shared memory block."""

    def __init__(self, name: str, count: int, size: int) -> None:
        self.shm = SharedMemory(name, create=True, size=count * size)  # clean: lives as long as the engine
        self.size = size
        self._ready: deque[Segment] = deque(
            Segment(i, self.shm.buf[i * size:(i + 1) * size]) for i in range(count)
        )

    def claim_segment(self) -> Segment | None:
        if not self._ready:
            return None
        segment = self._ready.popleft()  # clean: to the caller
        segment.length = 0
        return segment

    def recycle_segment(self, segment: Segment) -> None:
        self._ready.append(segment)


class CreditGate:
    """Flow control: messages that may be unacknowledged."""

    def __init__(self, credits: int) -> None:
        self._sem = asyncio.Semaphore(credits)

    async def take_credit(self) -> None:
        await self._sem.acquire()  # clean: handed to the caller, give_credit() releases it

    def give_credit(self) -> None:
        self._sem.release()


@dataclass
class Message:
    rid: int
    token_ids: list[int]
    final: bool = False


class ShmSender:
    """Writes messages into segments and notifies the reader."""

    def __init__(self, ring: SegmentRing, gate: CreditGate, notify) -> None:
        self.ring = ring
        self.gate = gate
        self.notify = notify
        self.unacked: dict[int, Segment] = {}
        self.seq = 0
        self._write_lock = Lock()

    def _write(self, segment: Segment, msg: Message) -> bool:
        body = struct.pack(f"<{len(msg.token_ids)}I", *msg.token_ids)
        if HEADER.size + len(body) > len(segment.view):
            return False
        segment.view[:HEADER.size] = HEADER.pack(msg.rid, len(msg.token_ids), int(msg.final))
        segment.view[HEADER.size:HEADER.size + len(body)] = body
        segment.length = HEADER.size + len(body)
        return True

    def send_nowait(self, msg: Message) -> bool:
        """Send one message; False when nothing was sent."""
        segment = self.ring.claim_segment()  # leak: a message that does not fit returns with the segment
        if segment is None:
            return False
        if not self._write(segment, msg):
            logger.error("message of request %d is too long", msg.rid)
            return False
        self.seq += 1
        self.unacked[self.seq] = segment
        self.notify(self.seq, segment.index)
        return True

    def on_ack(self, seq: int) -> None:
        """Called when the reader has consumed a segment."""
        segment = self.unacked.pop(seq, None)
        if segment is not None:
            self.ring.recycle_segment(segment)

    async def send(self, msg: Message, attempts: int = 5) -> bool:
        """Send with flow control, waiting for segments."""
        await self.gate.take_credit()  # clean: near miss, the return inside the loop runs the finally
        try:
            for _ in range(attempts):
                if self.send_nowait(msg):
                    return True
                await asyncio.sleep(0.001)
            return False
        finally:
            self.gate.give_credit()

    async def send_batch(self, msgs: list[Message]) -> int:
        """Send many messages, one credit each."""
        sent = 0
        for msg in msgs:
            await self.gate.take_credit()  # leak: empty messages are skipped with their credit
            if not msg.token_ids and not msg.final:
                continue
            if self.send_nowait(msg):
                sent += 1
            self.gate.give_credit()
        return sent

    def send_chunked(self, msg: Message, chunk: int) -> bool:
        """Split a long message over several segments, all or nothing."""
        parts = [msg.token_ids[i:i + chunk] for i in range(0, len(msg.token_ids), chunk)]
        claimed: list[Segment] = []
        for _ in parts:
            segment = self.ring.claim_segment()  # clean: near miss, on failure all claimed ones are recycled, else they are unacked
            if segment is None:
                for s in claimed:
                    self.ring.recycle_segment(s)
                return False
            claimed.append(segment)
        for segment, ids in zip(claimed, parts):
            self._write(segment, Message(msg.rid, ids))
            self.seq += 1
            self.unacked[self.seq] = segment
            self.notify(self.seq, segment.index)
        return True

    def resend(self, seq: int, msg: Message) -> bool:
        """Write a message again under its old sequence number."""
        segment = self.ring.claim_segment()  # leak: overwrites the unacked segment of the same number
        if segment is None:
            return False
        if not self._write(segment, msg):
            self.ring.recycle_segment(segment)
            return False
        self.unacked[seq] = segment
        self.notify(seq, segment.index)
        return True

    def send_control(self, code: int) -> bool:
        """A message without tokens, serialised with other processes."""
        if not self._write_lock.acquire(timeout=0.1):  # leak: without a free segment it returns while holding the lock
            return False
        segment = self.ring.claim_segment()  # clean: near miss, the number was just counted up, on_ack() recycles it
        if segment is None:
            return False
        self._write(segment, Message(code, [], final=True))
        self.seq += 1
        self.unacked[self.seq] = segment
        self.notify(self.seq, segment.index)
        self._write_lock.release()
        return True

    def free_segments(self, limit: int) -> int:
        """Number of segments that could be claimed, at most limit."""
        claimed: list[Segment] = []
        while len(claimed) < limit:
            segment = self.ring.claim_segment()  # clean: near miss, the break only ends the counting, all go back below
            if segment is None:
                break
            claimed.append(segment)
        for segment in claimed:
            self.ring.recycle_segment(segment)
        return len(claimed)
