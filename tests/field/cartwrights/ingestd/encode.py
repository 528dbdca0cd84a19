"""Turns documents into token bytes, using pooled buffers."""

from __future__ import annotations

import logging
from typing import Iterable, Iterator, Optional

from .pools import BufferPool

logger = logging.getLogger(__name__)


class DocumentTooLarge(ValueError):
    pass


class Encoder:
    def __init__(self, pool: BufferPool, pad: int = 0) -> None:
        self.pool = pool
        self.pad = pad
        self._tail: Optional[bytearray] = None
        self._tail_len = 0

    def encode(self, text: str) -> Optional[bytearray]:
        """Encoded document in a pooled buffer, which the caller replaces."""
        buf = self.pool.pick()  # leak: a document that does not fit raises after the pick
        if buf is None:
            return None
        raw = text.encode()
        if len(raw) > self.pool.size:
            raise DocumentTooLarge(f"{len(raw)} bytes")
        buf[: len(raw)] = raw
        return buf

    def encode_bytes(self, text: str) -> bytes:
        buf = self.encode(text)  # leak: bytes() copies, the buffer that came back from encode is not replaced
        return bytes(buf[: len(text)]) if buf is not None else b""

    def fingerprint(self, text: str) -> int:
        buf = self.encode(text)  # clean: replaced once the hash is there
        if buf is None:
            return 0
        value = hash(bytes(buf))
        self.pool.replace(buf)
        return value

    def pack(self, texts: Iterable[str]) -> Iterator[bytes]:
        """Concatenate documents; a full buffer is emitted as bytes."""
        if self._tail is None:
            self._tail = self.pool.pick()  # clean: only picked for an empty field, which close replaces
            self._tail_len = 0
        if self._tail is None:
            return
        for text in texts:
            raw = text.encode()[: self.pool.size]
            if self._tail_len + len(raw) > self.pool.size:
                yield bytes(self._tail[: self._tail_len])
                self._tail_len = 0
            self._tail[self._tail_len : self._tail_len + len(raw)] = raw
            self._tail_len += len(raw)

    def close(self) -> bytes:
        if self._tail is None:
            return b""
        out = bytes(self._tail[: self._tail_len])
        self.pool.replace(self._tail)
        self._tail, self._tail_len = None, 0
        return out
