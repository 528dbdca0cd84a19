"""Streams of a multiplexed connection: odd numbers, at most so many open."""
import asyncio


class StreamLimitReached(Exception):
    pass


class MuxConnection:
    def __init__(self, transport, max_open=100):
        self.transport = transport
        self.max_open = max_open
        self.inbox = {}
        self._last = -1

    def open_stream(self):
        if len(self.inbox) >= self.max_open:
            raise StreamLimitReached(self.max_open)
        self._last += 2
        self.inbox[self._last] = asyncio.Queue()
        return self._last

    def end_stream(self, sid):
        self.inbox.pop(sid, None)

    def reset_stream(self, sid, code):
        self.transport.write(("RST", sid, code))
        self.end_stream(sid)

    async def frames(self, sid):
        while (frame := await self.inbox[sid].get()) is not None:
            yield frame


async def call(mux, method, body):
    sid = mux.open_stream()  # clean: ended in finally
    try:
        mux.transport.write((method, sid, body))
        return [f async for f in mux.frames(sid)]
    finally:
        mux.end_stream(sid)


async def first_frame(mux, method):
    sid = mux.open_stream()  # leak: the first frame is returned with the stream open
    mux.transport.write((method, sid, b""))
    async for frame in mux.frames(sid):
        return frame
    mux.end_stream(sid)
    return None


async def upload(mux, chunks, limit):
    sid = mux.open_stream()  # clean: reset when too large, ended otherwise
    total = 0
    for chunk in chunks:
        total += len(chunk)
        if total > limit:
            mux.reset_stream(sid, 8)
            return False
        mux.transport.write(("DATA", sid, chunk))
    mux.end_stream(sid)
    return True


def notify(mux, message):
    mux.transport.write(("NOTE", mux.open_stream(), message))  # leak: the number is written and dropped
