"""Output side of the server: detokenizer states, output rings and event streams per client."""
from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import AsyncIterator, Callable, Iterator, Optional


class DetokState:
    __slots__ = ("ids", "prefix", "emitted", "uses")

    def __init__(self) -> None:
        self.wipe()

    def wipe(self) -> None:
        self.ids: list[int] = []
        self.prefix = 0
        self.emitted = ""
        self.uses = 0


class DetokPool:
    """Incremental detokenizer states are recycled, because they hold native buffers."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self._spare: list[DetokState] = []
        self.live = 0

    def new_state(self) -> DetokState:
        self.live += 1
        return self._spare.pop() if self._spare else DetokState()

    def dispose(self, st: DetokState) -> None:
        self.live -= 1
        st.wipe()
        if len(self._spare) < self.cap:
            self._spare.append(st)


@dataclass
class Channel:
    cid: int
    buf: asyncio.Queue = field(default_factory=lambda: asyncio.Queue(64))
    closed: bool = False


class ChannelTable:
    def __init__(self, n: int) -> None:
        self._free = [Channel(i) for i in range(n)]

    def open_channel(self) -> Optional[Channel]:
        if not self._free:
            return None
        ch = self._free.pop()
        ch.closed = False
        return ch

    def close_channel(self, ch: Channel) -> None:
        while not ch.buf.empty():
            ch.buf.get_nowait()
        ch.closed = True
        self._free.append(ch)


@dataclass
class Stream:
    rid: str
    channel: Channel
    detok: DetokState
    stop: list[str] = field(default_factory=list)
    n_sent: int = 0


Decode = Callable[[DetokState, int], str]


class OutputManager:
    def __init__(self, detoks: DetokPool, channels: ChannelTable, decode: Decode) -> None:
        self.detoks = detoks
        self.channels = channels
        self.decode = decode
        self.streams: dict[str, Stream] = {}
        self.echo: dict[str, DetokState] = {}

    # ---- open and close ----------------------------------------------------

    def open(self, rid: str, stop: list[str]) -> Optional[Stream]:
        ch = self.channels.open_channel()  # clean: in the stream, close closes it
        if ch is None:
            return None
        st = Stream(rid, ch, self.detoks.new_state(), stop)  # clean: in the stream, close disposes of it
        self.streams[rid] = st
        return st

    def open_n(self, rid: str, n: int) -> list[Stream]:
        """Parallel sampling: n streams or none."""
        made: list[Stream] = []
        for i in range(n):
            ch = self.channels.open_channel()  # clean: near miss, closed again if a later one fails
            if ch is None:
                for st in made:
                    self.channels.close_channel(st.channel)
                return []
            det = self.detoks.new_state()  # leak: the failing way closes channels but no states
            made.append(Stream(f"{rid}_{i}", ch, det))
        for st in made:
            self.streams[st.rid] = st
        return made

    def close(self, rid: str) -> None:
        st = self.streams.pop(rid, None)
        if st is None:
            return
        self.detoks.dispose(st.detok)
        self.channels.close_channel(st.channel)

    def set_echo(self, rid: str, prompt: list[int]) -> str:
        det = self.detoks.new_state()  # leak: end_echo pops the state and only reads from it
        self.echo[rid] = det
        return "".join(self.decode(det, t) for t in prompt)

    def end_echo(self, rid: str) -> str:
        det = self.echo.pop(rid, None)
        return det.emitted if det is not None else ""

    # ---- pushing ---------------------------------------------------------

    def push(self, rid: str, token: int) -> bool:
        st = self.streams.get(rid)
        if st is None:
            return False
        text = self.decode(st.detok, token)
        st.detok.emitted += text
        st.n_sent += 1
        if any(s in st.detok.emitted for s in st.stop):
            self.close(rid)
            return False
        st.channel.buf.put_nowait(text)
        return True

    def logprob_texts(self, rows: list[list[int]]) -> list[list[str]]:
        out = []
        for row in rows:
            det = self.detoks.new_state()  # leak: an empty row continues without disposing
            if not row:
                out.append([])
                continue
            out.append([self.decode(det, t) for t in row])
            self.detoks.dispose(det)
        return out

    @contextlib.contextmanager
    def temp_state(self) -> Iterator[DetokState]:
        det = self.detoks.new_state()  # leak: a state without ids returns before disposal
        yield det
        if not det.ids:
            return
        self.detoks.dispose(det)

    def render(self, ids: list[int]) -> str:
        with contextlib.ExitStack() as stack:
            det = self.detoks.new_state()  # clean: near miss, the stack's callback disposes of it
            stack.callback(self.detoks.dispose, det)
            if not ids:
                return ""
            return "".join(self.decode(det, t) for t in ids)

    # ---- event streams -------------------------------------------------------

    async def events(self, rid: str) -> AsyncIterator[str]:
        st = self.open(rid, [])  # clean: the finally closes the stream
        if st is None:
            yield "data: overloaded\n\n"
            return
        try:
            while not st.channel.closed:
                text = await st.channel.buf.get()
                if text is None:
                    break
                yield f"data: {text}\n\n"
        finally:
            self.close(rid)

    async def collect(self, feed: AsyncIterator[int], limit: int) -> str:
        det = self.detoks.new_state()  # leak: the limit's return skips the disposal
        parts: list[str] = []
        async for token in feed:
            parts.append(self.decode(det, token))
            if len(parts) >= limit:
                return "".join(parts)
        self.detoks.dispose(det)
        return "".join(parts)


class Broadcast:
    """One generation to many listeners, for shared demos."""

    def __init__(self, table: ChannelTable) -> None:
        self.table = table
        self.listeners: list[Channel] = []

    def join(self) -> Optional[Channel]:
        ch = self.table.open_channel()  # clean: near miss, part or finish closes each listener
        if ch is not None:
            self.listeners.append(ch)
        return ch

    def part(self, ch: Channel) -> None:
        self.listeners.remove(ch)
        self.table.close_channel(ch)

    async def say(self, text: str) -> None:
        for ch in self.listeners:
            await ch.buf.put(text)

    def finish(self) -> None:
        while self.listeners:
            self.table.close_channel(self.listeners.pop())


class MutedBroadcast(Broadcast):
    """Listeners can be muted; muted ones stay in a list of their own."""

    def __init__(self, table: ChannelTable) -> None:
        super().__init__(table)
        self.muted: list[Channel] = []

    def join_muted(self) -> Optional[Channel]:
        ch = self.table.open_channel()  # leak: finish closes the listeners and only clears the muted
        if ch is not None:
            self.muted.append(ch)
        return ch

    def finish(self) -> None:
        super().finish()
        self.muted.clear()
