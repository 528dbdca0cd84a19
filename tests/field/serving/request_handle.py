"""Client-side handles of requests. A handle keeps an output channel until it is finished or aborted."""

import logging
import threading
from typing import Callable, Dict, Iterator, List, Optional

logger = logging.getLogger(__name__)


class Channel:
    def __init__(self, cid: int):
        self.cid = cid
        self.items: List[str] = []
        self.eos = False

    def write(self, item: str):
        self.items.append(item)


class ChannelPool:
    def __init__(self, n: int):
        self._mutex = threading.Lock()
        self._idle = {i: Channel(i) for i in range(n)}
        self._opened: Dict[int, Channel] = {}

    def open_channel(self) -> Optional[Channel]:
        with self._mutex:
            if not self._idle:
                return None
            cid, ch = self._idle.popitem()
            self._opened[cid] = ch
            return ch

    def close_channel(self, ch: Channel) -> None:
        with self._mutex:
            del self._opened[ch.cid]
            ch.items.clear()
            ch.eos = False
            self._idle[ch.cid] = ch


class RequestHandle:
    def __init__(self, rid: str, pool: ChannelPool, ch: Channel, owns: bool = True):
        self.rid = rid
        self._pool = pool
        self._ch: Optional[Channel] = ch
        self.owns = owns
        self.callbacks: List[Callable[[str], None]] = []

    def __iter__(self) -> Iterator[str]:
        if self._ch is not None:
            yield from self._ch.items

    def finish(self) -> None:
        ch, self._ch = self._ch, None
        if ch is not None and self.owns:
            self._pool.close_channel(ch)


class Client:
    def __init__(self, pool: ChannelPool):
        self.pool = pool
        self.handles: Dict[str, RequestHandle] = {}
        self.broadcast_ch: Optional[Channel] = None

    def submit(self, rid: str, prompt: str) -> Optional[RequestHandle]:
        if rid in self.handles:
            return None
        ch = self.pool.open_channel()  # clean: owned by the handle in the table, closed by finish
        if ch is None:
            return None
        ch.write(prompt)
        handle = RequestHandle(rid, self.pool, ch)
        self.handles[rid] = handle
        return handle

    def submit_shared(self, rid: str, prompt: str) -> Optional[RequestHandle]:
        if rid in self.handles:
            return None
        ch = self.pool.open_channel()  # leak: the handle does not own it, so finish never closes it
        if ch is None:
            return None
        ch.write(prompt)
        handle = RequestHandle(rid, self.pool, ch, owns=False)
        self.handles[rid] = handle
        return handle

    def submit_broadcast(self, rid: str) -> Optional[RequestHandle]:
        if self.broadcast_ch is None:
            self.broadcast_ch = self.pool.open_channel()  # clean: near miss, handles do not own it, but shutdown closes it
        if self.broadcast_ch is None or rid in self.handles:
            return None
        handle = RequestHandle(rid, self.pool, self.broadcast_ch, owns=False)
        self.handles[rid] = handle
        return handle

    def submit_dedup(self, rid: str, prompt: str) -> RequestHandle:
        ch = self.pool.open_channel()  # leak: the handle that exists is returned, the new channel is lost
        known = self.handles.get(rid)
        if known is not None:
            return known
        ch.write(prompt)
        self.handles[rid] = RequestHandle(rid, self.pool, ch)
        return self.handles[rid]

    def finish(self, rid: str) -> None:
        h = self.handles.pop(rid, None)
        if h is not None:
            h.finish()

    def shutdown(self) -> None:
        for rid in list(self.handles):
            self.finish(rid)
        if self.broadcast_ch is not None:
            self.pool.close_channel(self.broadcast_ch)
            self.broadcast_ch = None

    def complete(self, prompt: str) -> str:
        h = self.submit("tmp", prompt)  # clean: finished through the table
        if h is None:
            return ""
        text = "".join(h)
        self.finish("tmp")
        return text

    def probe(self, words: List[str]) -> int:
        ch = self.pool.open_channel()  # leak: the swallowed error jumps over the close
        if ch is None:
            return -1
        try:
            for w in words:
                if not w:
                    raise ValueError("empty word")
                ch.write(w)
            self.pool.close_channel(ch)
        except ValueError as e:
            logger.info("probe: %s", e)
            return 0
        return len(words)

    def probe_all(self, words: List[str]) -> int:
        ch = self.pool.open_channel()  # clean: near miss, the close lies after the handler
        if ch is None:
            return -1
        n = 0
        try:
            for w in words:
                if not w:
                    raise ValueError("empty word")
                ch.write(w)
                n += 1
        except ValueError as e:
            logger.info("probe: %s", e)
        self.pool.close_channel(ch)
        return n

    def tee(self, prompt: str, sink: Callable[[str], None]) -> bool:
        left = self.pool.open_channel()  # clean: near miss, closed on both early exits and at the end
        if left is None:
            return False
        right = self.pool.open_channel()  # leak: for an empty prompt only left is closed
        if right is None or not prompt:
            self.pool.close_channel(left)
            return False
        for ch in (left, right):
            ch.write(prompt)
            sink(prompt)
            self.pool.close_channel(ch)
        return True
