"""Building a prefill request in steps; build() hands over, discard() gives up."""
from __future__ import annotations

from dataclasses import dataclass, field


class InputBuffers:
    def __init__(self) -> None:
        self._spare: list[list[int]] = []
        self.lent = 0

    def checkout(self) -> list[int]:
        self.lent += 1
        return self._spare.pop() if self._spare else []

    def checkin(self, buf: list[int]) -> None:
        self.lent -= 1
        buf.clear()
        self._spare.append(buf)


@dataclass
class Prepared:
    buffers: InputBuffers
    tokens: list[int]
    positions: list[int]

    def release(self) -> None:
        self.buffers.checkin(self.tokens)
        self.buffers.checkin(self.positions)


@dataclass
class Builder:
    buffers: InputBuffers
    tokens: list[int] | None = None
    positions: list[int] | None = None
    notes: list[str] = field(default_factory=list)

    def with_tokens(self, tokens: list[int]) -> Builder:
        if self.tokens is None:
            self.tokens = self.buffers.checkout()  # clean: near miss, handed to Prepared by build or checked in by discard
        self.tokens.extend(tokens)
        return self

    def with_positions(self, start: int) -> Builder:
        if self.positions is not None:
            self.buffers.checkin(self.positions)
        self.positions = self.buffers.checkout()  # clean: near miss, a second call checks the former in first
        self.positions.extend(range(start, start + 4))
        return self

    def build(self) -> Prepared | None:
        if self.tokens is None or self.positions is None:
            self.discard()
            return None
        prepared = Prepared(self.buffers, self.tokens, self.positions)
        self.tokens = self.positions = None
        return prepared

    def discard(self) -> None:
        for buf in (self.tokens, self.positions):
            if buf is not None:
                self.buffers.checkin(buf)
        self.tokens = None
        self.positions = None


class MaskBuilder:
    def __init__(self, buffers: InputBuffers) -> None:
        self.buffers = buffers
        self.mask: list[int] | None = None

    def fill(self, n: int) -> MaskBuilder:
        self.mask = self.buffers.checkout()  # leak: build sets the field to None after copying
        self.mask.extend([1] * n)
        return self

    def build(self) -> tuple[int, ...]:
        result = tuple(self.mask or ())
        self.mask = None
        return result


def prefill(buffers: InputBuffers, prompt: list[int]) -> int:
    prepared = Builder(buffers).with_tokens(prompt).with_positions(0).build()
    if prepared is None:
        return 0
    try:
        return sum(prepared.tokens) + prepared.positions[0]
    finally:
        prepared.release()


def masked(buffers: InputBuffers, n: int) -> int:
    return sum(MaskBuilder(buffers).fill(n).build())


def merge(buffers: InputBuffers, left: list[int], right: list[int]) -> list[int]:
    merged = buffers.checkout()  # clean: near miss, returned to the caller while both arguments are checked in
    merged.extend(left)
    merged.extend(right)
    buffers.checkin(left)
    buffers.checkin(right)
    return merged


def merge_all(buffers: InputBuffers, parts: list[list[int]]) -> int:
    """Parts are plain lists, not buffers."""
    acc = buffers.checkout()  # clean: near miss, merge checks in both its arguments
    for part in parts:
        piece = buffers.checkout()  # clean: near miss, merge checks in both its arguments
        piece.extend(part)
        acc = merge(buffers, acc, piece)  # clean: near miss, merged again or checked in at the end
    n = len(acc)
    buffers.checkin(acc)
    return n


def count_all(buffers: InputBuffers, parts: list[list[int]]) -> int:
    n = 0
    for part in parts:
        piece = buffers.checkout()  # leak: an empty part goes round again without the checkin
        piece.extend(part)
        if not piece:
            continue
        n += len(piece)
        buffers.checkin(piece)
    return n
