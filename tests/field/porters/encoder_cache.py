"""Embeddings of images, audio and video for multimodal prompts."""
from __future__ import annotations

import collections
import functools
import threading
from typing import NamedTuple


class Span(NamedTuple):
    start: int
    length: int


class EmbedArena:
    def __init__(self, size):
        self._holes = {0: size}
        self._lock = threading.Lock()

    def reserve(self, length):
        with self._lock:
            for start, room in sorted(self._holes.items()):
                if room >= length:
                    del self._holes[start]
                    if room > length:
                        self._holes[start + length] = room - length
                    return Span(start, length)
        return None

    def release(self, span):
        with self._lock:
            self._holes[span.start] = span.length


class EncoderCache:
    def __init__(self, arena):
        self.arena = arena
        self.spans = {}
        self.users = collections.defaultdict(set)

    def get(self, rid, mm_hash, length):
        if mm_hash not in self.spans:
            span = self.arena.reserve(length)  # clean: near miss, shared by hash, free_request of the last user releases it
            if span is None:
                return None
            self.spans[mm_hash] = span
        self.users[mm_hash].add(rid)
        return self.spans[mm_hash]

    def free_request(self, rid):
        for mm_hash in list(self.users):
            self.users[mm_hash].discard(rid)
            if not self.users[mm_hash]:
                del self.users[mm_hash]
                self.arena.release(self.spans.pop(mm_hash))


class ImageTiler:
    def __init__(self, arena, encode):
        self.arena = arena
        self.encode = encode
        self.tiles = collections.defaultdict(list)

    def add_image(self, rid, tiles):
        for tile in tiles:
            span = self.arena.reserve(tile.tokens)  # leak: a tile that cannot be encoded is skipped with its span
            if span is None:
                return False
            try:
                self.encode(tile, span)
            except ValueError:
                continue
            self.tiles[rid].append(span)
        return True

    def finish(self, rid):
        for span in self.tiles.pop(rid, ()):
            self.arena.release(span)


class AudioWindow:
    """The last seconds of a live audio stream."""

    def __init__(self, arena, chunks):
        self.arena = arena
        self.window = collections.deque(maxlen=chunks)

    def push(self, chunk, encode):
        span = self.arena.reserve(chunk.tokens)  # leak: a full deque drops its oldest span on append
        if span is None:
            return False
        encode(chunk, span)
        self.window.append(span)
        return True

    def close(self):
        while self.window:
            self.arena.release(self.window.popleft())


class VideoWindow:
    """The last frames of a live video stream."""

    def __init__(self, arena, frames):
        self.arena = arena
        self.window = collections.deque(maxlen=frames)

    def push(self, frame, encode):
        if len(self.window) == self.window.maxlen:
            self.arena.release(self.window.popleft())
        span = self.arena.reserve(frame.tokens)  # clean: near miss, the oldest one is released before the deque could drop it
        if span is None:
            return False
        encode(frame, span)
        self.window.append(span)
        return True

    def close(self):
        while self.window:
            self.arena.release(self.window.popleft())


class ConcurrentDedup:
    def __init__(self, arena, encode):
        self.arena = arena
        self.encode = encode
        self.by_hash = {}

    async def embed_image(self, mm_hash, image):
        if mm_hash in self.by_hash:
            return self.by_hash[mm_hash]
        span = self.arena.reserve(image.tokens)  # leak: when another task was first, setdefault keeps its span and this one is dropped
        if span is None:
            return None
        await self.encode(image, span)
        return self.by_hash.setdefault(mm_hash, span)

    async def embed_audio(self, mm_hash, audio):
        if mm_hash in self.by_hash:
            return self.by_hash[mm_hash]
        span = self.arena.reserve(audio.tokens)  # clean: near miss, the loser of the race releases its span
        if span is None:
            return None
        await self.encode(audio, span)
        winner = self.by_hash.setdefault(mm_hash, span)
        if winner is not span:
            self.arena.release(span)
        return winner

    def evict(self, mm_hash):
        span = self.by_hash.pop(mm_hash, None)
        if span is not None:
            self.arena.release(span)


class Entry(NamedTuple):
    tokens: Span
    deepstack: Span | None


class DeepstackCache:
    """Encoders of this family also emit features for the first decoder layers."""

    def __init__(self, arena):
        self.arena = arena
        self.entries = {}

    def add(self, rid, count, levels):
        if rid in self.entries:
            return True
        tokens = self.arena.reserve(count)  # clean: kept in the entry, or released when the second one fails
        if tokens is None:
            return False
        deepstack = None
        if levels:
            deepstack = self.arena.reserve(count * levels)  # leak: remove releases the token span of the entry only
            if deepstack is None:
                self.arena.release(tokens)
                return False
        self.entries[rid] = Entry(tokens, deepstack)
        return True

    def remove(self, rid):
        entry = self.entries.pop(rid, None)
        if entry is not None:
            self.arena.release(entry.tokens)


def make_prompt_embedder(arena, encode):
    @functools.lru_cache(maxsize=256)
    def embed(text):
        span = arena.reserve(len(text) // 2 + 1)  # leak: the memo table drops the oldest span when it is full
        if span is not None:
            encode(text, span)
        return span

    return embed


def make_special_tokens(arena, encode, names):
    spans = {name: arena.reserve(1) for name in names}  # clean: near miss, filled once at start-up for the life of the process
    for name, span in spans.items():
        encode(name, span)
    return spans.__getitem__
