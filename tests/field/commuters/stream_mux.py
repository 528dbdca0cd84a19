"""Multiplexes token streams of many chats over one worker link; every chat needs a stream id."""
from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import AsyncIterator, Awaitable, Callable, Optional

log = logging.getLogger("mux")

OnClose = Callable[[int], None]


class StreamIds:
    """Bitmap of 64-bit words."""

    def __init__(self, words: int) -> None:
        self._words = [0] * words

    def next_id(self) -> int:
        for w, bits in enumerate(self._words):
            if bits == (1 << 64) - 1:
                continue
            low = ~bits & (bits + 1)
            self._words[w] |= low  # clean: the id is returned
            return w * 64 + low.bit_length() - 1
        return -1

    def retire(self, sid: int) -> None:
        self._words[sid // 64] &= ~(1 << (sid % 64))


@dataclass
class Stream:
    sid: int
    queue: "asyncio.Queue[Optional[str]]" = field(default_factory=asyncio.Queue)
    on_close: Optional[OnClose] = None
    owns_id: bool = True

    def close(self) -> None:
        if self.owns_id and self.on_close is not None:
            self.on_close(self.sid)
        self.on_close = None


class Link:
    def __init__(self, ids: StreamIds, write: Callable[[int, str], Awaitable[bool]]) -> None:
        self.ids = ids
        self.write = write
        self.streams: dict[int, Stream] = {}
        self.control: Optional[Stream] = None

    def open(self) -> Optional[Stream]:
        sid = self.ids.next_id()  # clean: near miss, the stream's close calls retire through on_close
        if sid < 0:
            return None
        stream = Stream(sid, on_close=self._closed)
        self.streams[sid] = stream
        return stream

    def _closed(self, sid: int) -> None:
        self.streams.pop(sid, None)
        self.ids.retire(sid)

    def mirror(self, other: Stream) -> Stream:
        return Stream(other.sid, other.queue, None, owns_id=False)

    def open_raw(self) -> int:
        return self.ids.next_id()  # clean: handed through

    def ensure_control(self) -> Optional[Stream]:
        if self.control is None:
            self.control = self.open()  # clean: the link's own, shutdown closes it
        return self.control

    def reset_control(self) -> Optional[Stream]:
        self.control = self.open()  # clean: near miss, the former one is still in streams and shutdown closes it
        return self.control

    def shutdown(self) -> None:
        for stream in list(self.streams.values()):
            stream.close()
        self.control = None

    async def chat(self, prompt: str) -> AsyncIterator[str]:
        stream = self.open()  # clean: closed in the finally
        if stream is None:
            return
        try:
            if not await self.write(stream.sid, prompt):
                return
            while (piece := await stream.queue.get()) is not None:
                yield piece
        finally:
            stream.close()

    async def ping(self) -> bool:
        sid = self.open_raw()  # leak: a failed write returns before the retire
        if sid < 0:
            return False
        if not await self.write(sid, "ping"):
            return False
        self.ids.retire(sid)
        return True

    async def broadcast(self, text: str, copies: int) -> int:
        sent = 0
        for _ in range(copies):
            sid = self.open_raw()  # clean: near miss, retired on the failure side before the continue
            if sid < 0:
                break
            if not await self.write(sid, text):
                self.ids.retire(sid)
                continue
            sent += 1
            self.ids.retire(sid)
        return sent

    async def flood(self, texts: list[str]) -> int:
        sent = 0
        for text in texts:
            sid = self.open_raw()  # leak: empty texts continue without retire
            if sid < 0:
                await asyncio.sleep(0.01)
                continue
            if not text:
                continue
            sent += int(await self.write(sid, text))
            self.ids.retire(sid)
        return sent


async def resume_all(link: Link, prompts: dict[str, str]) -> dict[str, int]:
    """Re-send prompts after a reconnect; the ids are remembered by chat until they end."""
    started: dict[str, int] = {}
    for chat, prompt in prompts.items():
        sid = link.open_raw()  # leak: a connection error is caught and the id is not remembered
        if sid < 0:
            break
        try:
            await link.write(sid, prompt)
            started[chat] = sid
        except ConnectionError:
            log.warning("resume of %s failed", chat)
    return started


def end_all(link: Link, started: dict[str, int]) -> None:
    while started:
        _, sid = started.popitem()
        link.ids.retire(sid)


async def handover(old: Link, new: Link) -> int:
    moved = 0
    for stream in list(old.streams.values()):
        sid = new.open_raw()  # leak: a stream that owns no id is passed over after the new id was drawn
        if sid < 0:
            break
        if not stream.owns_id:
            continue
        stream.close()
        stream.sid, stream.on_close = sid, new._closed
        new.streams[sid] = stream
        moved += 1
    return moved
