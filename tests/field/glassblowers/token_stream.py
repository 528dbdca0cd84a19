"""Streaming of generated tokens to clients: channels, detokenizer state and SSE writers."""
from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from typing import AsyncIterator, Deque, Dict, Iterator, List, Optional

log = logging.getLogger(__name__)

DONE = object()


class Channel:
    __slots__ = ("cid", "queue", "closed")

    def __init__(self, cid: int, depth: int) -> None:
        self.cid = cid
        self.queue: asyncio.Queue = asyncio.Queue(depth)
        self.closed = False

    def reset(self) -> None:
        while not self.queue.empty():
            self.queue.get_nowait()
        self.closed = False


class ChannelDeck:
    """Reusable channels between the engine thread and the HTTP handlers."""

    def __init__(self, size: int, depth: int = 64) -> None:
        self._deck: Deque[Channel] = deque(Channel(i, depth) for i in range(size))

    def deal(self) -> Optional[Channel]:
        if not self._deck:
            return None
        ch = self._deck.popleft()  # clean: returned to the caller after the reset
        ch.reset()
        return ch

    def fold(self, ch: Channel) -> None:
        ch.closed = True
        self._deck.append(ch)

    def deal_fresh(self) -> Optional[Channel]:
        """Skips channels a slow reader still drains."""
        while self._deck:
            ch = self._deck.popleft()  # leak: a channel with unread items is popped and never put back
            if ch.queue.empty():
                return ch
        return None


class DetokenizerPool:
    """Incremental decoders are costly to build; lent by tokenizer name."""

    def __init__(self, factory, cap: int) -> None:
        self.factory = factory
        self.cap = cap
        self.lent = 0
        self._shelf: Dict[str, List] = {}

    def lend(self, name: str):
        if self.lent >= self.cap:
            return None
        self.lent += 1
        shelf = self._shelf.get(name)
        if shelf:
            return shelf.pop()  # clean: returned to the caller
        return self.factory(name)

    def shelve(self, dec) -> None:
        self.lent -= 1
        dec.clear()
        self._shelf.setdefault(dec.name, []).append(dec)


class Stream:
    def __init__(self, rid: str, channel: Channel, decoder) -> None:
        self.rid = rid
        self.channel = channel
        self.decoder = decoder
        self.text = ""


class StreamHub:
    def __init__(self, deck: ChannelDeck, decoders: DetokenizerPool, model: str) -> None:
        self.deck = deck
        self.decoders = decoders
        self.model = model
        self.streams: Dict[str, Stream] = {}

    def open(self, rid: str) -> Optional[Stream]:
        ch = self.deck.deal()  # clean: folded when there is no decoder, else owned by the stream
        if ch is None:
            return None
        dec = self.decoders.lend(self.model)  # clean: owned by the stream, close() shelves it
        if dec is None:
            self.deck.fold(ch)
            return None
        stream = Stream(rid, ch, dec)
        self.streams[rid] = stream
        return stream

    def close(self, rid: str) -> None:
        stream = self.streams.pop(rid, None)
        if stream is None:
            return
        self.deck.fold(stream.channel)
        self.decoders.shelve(stream.decoder)

    def open_chat(self, rid: str, template) -> Optional[Stream]:
        dec = self.decoders.lend(template.tokenizer)  # leak: not shelved when no channel is left
        if dec is None:
            return None
        ch = self.deck.deal()  # clean: owned by the stream
        if ch is None:
            log.warning("no channel for %s", rid)
            return None
        dec.prime(template.prefix)
        stream = self.streams[rid] = Stream(rid, ch, dec)
        return stream

    def push(self, rid: str, token_ids: List[int], last: bool) -> None:
        stream = self.streams.get(rid)
        if stream is None:
            return
        piece = stream.decoder.feed(token_ids)
        if piece:
            stream.text += piece
            stream.channel.queue.put_nowait(piece)
        if last:
            stream.channel.queue.put_nowait(DONE)

    async def events(self, rid: str) -> AsyncIterator[str]:
        stream = self.open(rid)  # clean: near miss, closed by id in finally
        if stream is None:
            yield sse({"error": "overloaded"})
            return
        try:
            while True:
                item = await stream.channel.queue.get()
                if item is DONE:
                    break
                yield sse({"text": item})
        finally:
            self.close(rid)

    def reroute(self, rid: str) -> bool:
        """Give a stream a new channel after its client reconnected."""
        stream = self.streams.get(rid)
        ch = self.deck.deal()  # leak: not folded when the stream is gone
        if ch is None or stream is None:
            return False
        old, stream.channel = stream.channel, ch
        self.deck.fold(old)
        return True

    def shutdown(self) -> None:
        for rid in list(self.streams):
            self.close(rid)


class Broadcast:
    """One generation watched by several clients."""

    def __init__(self, deck: ChannelDeck) -> None:
        self.deck = deck
        self.watchers: Dict[str, List[Channel]] = {}
        self.latest: Dict[str, Channel] = {}

    def watch(self, rid: str) -> Optional[Channel]:
        ch = self.deck.deal()  # clean: near miss, listed in watchers which end() folds
        if ch is not None:
            self.watchers.setdefault(rid, []).append(ch)
        return ch

    def unwatch(self, rid: str, ch: Channel) -> None:
        self.watchers[rid].remove(ch)
        self.deck.fold(ch)

    def watch_latest(self, user: str) -> Optional[Channel]:
        """Each user keeps only their most recent view."""
        ch = self.deck.deal()  # leak: the user's earlier channel is overwritten in self.latest
        if ch is None:
            return None
        self.latest[user] = ch
        return ch

    def leave_latest(self, user: str) -> None:
        ch = self.latest.pop(user, None)
        if ch is not None:
            self.deck.fold(ch)

    def end(self, rid: str) -> None:
        for ch in self.watchers.pop(rid, []):
            self.deck.fold(ch)


def sse(obj) -> str:
    return "data: " + json.dumps(obj) + "\n\n"


def decode_all(pool: DetokenizerPool, name: str, seqs: List[List[int]]) -> Iterator[str]:
    """Offline decoding, one decoder for all sequences."""
    dec = pool.lend(name)  # clean: shelved in finally
    if dec is None:
        raise RuntimeError("no decoder")
    try:
        for ids in seqs:
            dec.clear()
            yield dec.feed(ids)
    finally:
        pool.shelve(dec)


def count_chars(pool: DetokenizerPool, name: str, seqs: List[List[int]]) -> List[int]:
    counts = []
    for ids in seqs:
        dec = pool.lend(name)  # leak: continue for an incomplete character skips shelve
        if dec is None:
            break
        text = dec.feed(ids)
        if text.endswith("\ufffd"):
            counts.append(-1)
            continue
        counts.append(len(text))
        pool.shelve(dec)
    return counts
