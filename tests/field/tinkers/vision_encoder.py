"""Multimodal front of the Loupe model: encoder cache, canvas, decoder contexts, frames, mask rows."""
from __future__ import annotations

import threading
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Dict, List, NamedTuple, Optional, Set

DecodedFrame = namedtuple("DecodedFrame", "index width height")


class EncoderCache:
    """Image embeddings in a bounded token budget, shared between requests by content hash."""

    def __init__(self, budget: int) -> None:
        self._room = budget
        self._users: Dict[str, Set[str]] = {}
        self._size: Dict[str, int] = {}
        self._idle: "OrderedDict[str, int]" = OrderedDict()

    def allot(self, digest: str, rid: str, tokens: int) -> bool:
        if digest in self._size:
            self._idle.pop(digest, None)
            self._users[digest].add(rid)
            return True
        while tokens > self._room and self._idle:
            old, size = self._idle.popitem(last=False)
            self._room += size
            del self._size[old], self._users[old]
        if tokens > self._room:
            return False
        self._room -= tokens
        self._size[digest] = tokens
        self._users[digest] = {rid}
        return True

    def part_with(self, digest: str, rid: str) -> None:
        users = self._users[digest]
        users.remove(rid)
        if not users:
            self._idle[digest] = self._size[digest]


def encode_images(cache: EncoderCache, rid: str, images, encoder) -> Optional[List]:
    embeddings = []
    for image in images:
        if not cache.allot(image.digest, rid, image.tokens):  # leak: a later image without room returns None with the earlier ones allotted
            return None
        embeddings.append(encoder(image))
    for image in images:
        cache.part_with(image.digest, rid)
    return embeddings


def encode_images_or_none(cache: EncoderCache, rid: str, images, encoder) -> Optional[List]:
    allotted = []
    try:
        for image in images:
            if not cache.allot(image.digest, rid, image.tokens):  # clean: near miss, finally parts with those in the list
                return None
            allotted.append(image)
        return [encoder(image) for image in allotted]
    finally:
        for image in allotted:
            cache.part_with(image.digest, rid)


class Rect(NamedTuple):
    x: int
    y: int
    w: int
    h: int


class TileCanvas:
    """A texture packed in shelves; tiles of many images are encoded in one pass."""

    def __init__(self, width: int, height: int) -> None:
        self._width = width
        self._height = height
        self._shelves: List[List[int]] = []
        self._gaps: List[Rect] = []
        self.live = 0

    def place(self, w: int, h: int) -> Optional[Rect]:
        for gap in self._gaps:
            if gap.w >= w and gap.h >= h:
                self._gaps.remove(gap)
                self.live += 1
                return gap
        for shelf in self._shelves:
            y, tall, x = shelf
            if tall >= h and x + w <= self._width:
                shelf[2] = x + w
                self.live += 1
                return Rect(x, y, w, tall)
        top = sum(s[1] for s in self._shelves)
        if top + h > self._height or w > self._width:
            return None
        self._shelves.append([top, h, w])
        self.live += 1
        return Rect(0, top, w, h)

    def erase(self, rect: Rect) -> None:
        self._gaps.append(rect)
        self.live -= 1


def draw_tiles(canvas: TileCanvas, tiles, blit) -> List[Rect]:
    placed = []
    for tile in tiles:
        rect = canvas.place(tile.w, tile.h)  # leak: a tile that can not be blitted keeps its place, outside the list
        if rect is None:
            break
        if not blit(tile, rect):
            continue
        placed.append(rect)
    return placed


def preview(canvas: TileCanvas, tile, blit, render):
    rect = canvas.place(tile.w, tile.h)  # clean: near miss, no place returns None and else it is erased
    if rect is None:
        return None
    blit(tile, rect)
    picture = render(rect)
    canvas.erase(rect)
    return picture


@dataclass
class DecodeContext:
    serial: int
    codec: str
    dirty: bool = False


class DecoderContexts:
    """JPEG and video decode contexts, kept by codec and reset when they come in."""

    def __init__(self, per_codec: int) -> None:
        self._per_codec = per_codec
        self._home: Dict[str, List[DecodeContext]] = {}
        self._made: Dict[str, int] = {}
        self._cond = threading.Condition()

    def checkout(self, codec: str) -> DecodeContext:
        with self._cond:
            home = self._home.setdefault(codec, [])
            while not home and self._made.get(codec, 0) >= self._per_codec:
                self._cond.wait()
            if home:
                return home.pop()
            self._made[codec] = self._made.get(codec, 0) + 1
            return DecodeContext(self._made[codec], codec)

    def checkin(self, context: DecodeContext) -> None:
        context.dirty = False
        with self._cond:
            self._home[context.codec].append(context)
            self._cond.notify()


def decode(contexts: DecoderContexts, codec: str, data: bytes, backend):
    context = contexts.checkout(codec)  # leak: the caught ValueError of a corrupt image returns without checkin
    try:
        picture = backend.decode(context, data)
    except ValueError:
        return None
    contexts.checkin(context)
    return picture


def decode_many(contexts: DecoderContexts, codec: str, blobs, backend) -> List:
    pictures = []
    context = contexts.checkout(codec)  # clean: checked in after the loop, errors are handled inside it
    for data in blobs:
        try:
            pictures.append(backend.decode(context, data))
        except ValueError:
            pictures.append(None)
    contexts.checkin(context)
    return pictures


class VideoReader:
    def __init__(self, contexts: DecoderContexts, codec: str) -> None:
        self.contexts = contexts
        self.context = contexts.checkout(codec)  # leak: switch replaces the context without checking the first in

    def switch(self, codec: str) -> None:
        if codec != self.context.codec:
            self.context = self.contexts.checkout(codec)  # leak: a further switch replaces it in the same way

    def close(self) -> None:
        self.contexts.checkin(self.context)


class FrameRing:
    """Frames of a video in fixed bytearrays. A frame is named by its index and retired by it."""

    def __init__(self, frames: int, nbytes: int) -> None:
        self._store = [bytearray(nbytes) for _ in range(frames)]
        self._busy = [False] * frames
        self._at = 0

    def lay_down(self, pixels: bytes) -> int:
        for _ in range(len(self._store)):
            index = self._at
            self._at = (self._at + 1) % len(self._store)
            if not self._busy[index]:
                self._busy[index] = True
                self._store[index][:len(pixels)] = pixels
                return index
        return -1

    def frame(self, index: int) -> bytearray:
        return self._store[index]

    def retire(self, index: int) -> None:
        if not self._busy[index]:
            raise IndexError(f"frame {index} is not in use")
        self._busy[index] = False


def scan_video(ring: FrameRing, frames, detector) -> Optional[int]:
    for at, pixels in enumerate(frames):
        index = ring.lay_down(pixels)  # leak: the frame of a hit is not retired before the return
        if index < 0:
            return None
        if detector(ring.frame(index)):
            return at
        ring.retire(index)
    return None


class Clip:
    def __init__(self, ring: FrameRing) -> None:
        self.ring = ring
        self.indices: List[int] = []

    def add(self, pixels: bytes) -> bool:
        index = self.ring.lay_down(pixels)  # clean: kept in indices, retired by trim or clear
        if index < 0:
            return False
        self.indices.append(index)
        return True

    def trim(self, keep: int) -> None:
        while len(self.indices) > keep:
            self.ring.retire(self.indices.pop(0))

    def clear(self) -> None:
        self.trim(0)


def describe(ring: FrameRing, pixels: bytes, size) -> Optional[DecodedFrame]:
    index = ring.lay_down(pixels)  # clean: near miss, the index goes out in the record
    if index < 0:
        return None
    return DecodedFrame(index, *size)


class MaskRows:
    """Rows of the grammar bit mask; a row is a view of one big buffer, seated for a request."""

    def __init__(self, rows: int, words: int) -> None:
        self._buffer = bytearray(rows * words * 4)
        view = memoryview(self._buffer)
        self._rows = [view[r * words * 4:(r + 1) * words * 4] for r in range(rows)]
        self._free = (1 << rows) - 1
        self._row_of: Dict[str, int] = {}

    def seat(self, rid: str) -> memoryview:
        if not self._free:
            raise RuntimeError("no mask row")
        low = self._free & -self._free
        self._free ^= low
        self._row_of[rid] = low.bit_length() - 1
        return self._rows[self._row_of[rid]]

    def unseat(self, rid: str) -> None:
        self._free |= 1 << self._row_of.pop(rid)


def constrain(masks: MaskRows, rid: str, grammar, sampler):
    row = masks.seat(rid)  # leak: a grammar that is at its end returns before unseat
    if grammar.finished:
        return None
    grammar.fill(row)
    token = sampler.pick(row)
    masks.unseat(rid)
    return token


class GrammarState:
    def __init__(self, masks: MaskRows, rid: str, grammar) -> None:
        self.masks = masks
        self.rid = rid
        self.grammar = grammar
        self.row: Optional[memoryview] = None

    def __enter__(self) -> "GrammarState":
        self.row = self.masks.seat(self.rid)  # clean: unseated in exit
        return self

    def __exit__(self, *exc) -> None:
        self.masks.unseat(self.rid)
        self.row = None


class ImageSizes:
    """Sizes by digest, learned once."""

    def __init__(self) -> None:
        self._sizes: Dict[str, tuple] = {}

    def learn(self, digest: str, size: tuple) -> tuple:
        return self._sizes.setdefault(digest, size)

    def unlearn(self, digest: str) -> None:
        self._sizes.pop(digest, None)


def total_area(sizes: ImageSizes, images) -> int:
    area = 0
    for image in images:
        w, h = sizes.learn(image.digest, image.size)  # clean: a memo table
        if w * h > 1 << 24:
            continue
        area += w * h
    return area
