"""Budgeted cache of vision encoder outputs."""
import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

import torch

logger = logging.getLogger(__name__)


class EmbedArena:
    """Rows of a preallocated tensor; a row span belongs to one image."""

    def __init__(self, rows: int, dim: int):
        self.data = torch.zeros(rows, dim)
        self._holes: List[Tuple[int, int]] = [(0, rows)]

    def claim(self, n: int) -> Optional[Tuple[int, int]]:
        for i, (start, size) in enumerate(self._holes):
            if size >= n:
                if size == n:
                    self._holes.pop(i)
                else:
                    self._holes[i] = (start + n, size - n)
                return (start, n)
        return None

    def unclaim(self, span: Tuple[int, int]) -> None:
        self._holes.append(span)
        self._holes.sort()

    def claim_aligned(self, n: int, align: int) -> Optional[Tuple[int, int]]:
        for _ in range(len(self._holes)):
            start, size = self._holes.pop(0)  # leak: an unaligned hole is dropped instead of being put back
            if start % align:
                continue
            if size >= n:
                if size > n:
                    self._holes.append((start + n, size - n))
                return (start, n)
            self._holes.append((start, size))
        return None


@dataclass
class ImageInput:
    digest: str
    pixels: torch.Tensor
    tokens: int


class EncoderCache:
    def __init__(self, arena: EmbedArena, encoder, max_tokens: int = 1024):
        self.arena = arena
        self.encoder = encoder
        self.max_tokens = max_tokens
        self.spans: "OrderedDict[str, Tuple[int, int]]" = OrderedDict()
        self.users: Dict[str, int] = {}

    def _rows(self, span: Tuple[int, int]) -> torch.Tensor:
        return self.arena.data[span[0]: span[0] + span[1]]

    def _evict_one(self) -> bool:
        for digest in list(self.spans):
            if self.users.get(digest, 0) == 0:
                self.arena.unclaim(self.spans.pop(digest))
                return True
        return False

    def _claim(self, n: int) -> Optional[Tuple[int, int]]:
        span = self.arena.claim(n)  # clean: returned when found
        while span is None and self._evict_one():
            span = self.arena.claim(n)  # clean: near miss, repeated only while nothing was claimed
        return span

    def encode(self, img: ImageInput) -> Optional[torch.Tensor]:
        if img.digest in self.spans:
            self.spans.move_to_end(img.digest)
            return self._rows(self.spans[img.digest])
        span = self._claim(img.tokens)  # clean: in spans until evicted or cleared
        if span is None:
            return None
        self._rows(span).copy_(self.encoder(img.pixels))
        self.spans[img.digest] = span
        return self._rows(span)

    def encode_limited(self, img: ImageInput) -> Optional[torch.Tensor]:
        span = self._claim(img.tokens)  # leak: an encoder output that is too long returns None with the span claimed
        if span is None:
            return None
        out = self.encoder(img.pixels)
        if out.shape[0] > self.max_tokens:
            logger.error("image %s gives %d tokens", img.digest, out.shape[0])
            return None
        self._rows(span).copy_(out)
        result = self._rows(span).clone()
        self.arena.unclaim(span)
        return result

    def encode_once(self, img: ImageInput) -> Optional[torch.Tensor]:
        span = self._claim(img.tokens)  # clean: near miss, the rows are copied out before unclaim
        if span is None:
            return None
        rows = self._rows(span)
        rows.copy_(self.encoder(img.pixels))
        rows.div_(rows.norm(dim=-1, keepdim=True))
        out = rows.clone()
        self.arena.unclaim(span)
        return out

    def encode_batch(self, imgs: List[ImageInput]) -> Dict[str, torch.Tensor]:
        spans: Dict[str, Tuple[int, int]] = {}
        for img in imgs:
            if img.digest in spans:
                continue
            s = self._claim(img.tokens)  # clean: near miss, spans holds one per digest and all are unclaimed
            if s is None:
                break
            self._rows(s).copy_(self.encoder(img.pixels))
            spans[img.digest] = s
        out = {d: self._rows(s).clone() for d, s in spans.items()}
        for s in spans.values():
            self.arena.unclaim(s)
        return out

    def similarity(self, a: ImageInput, b: ImageInput) -> float:
        sa = self._claim(a.tokens)  # leak: without room for b, a's span is not unclaimed
        if sa is None:
            return 0.0
        sb = self._claim(b.tokens)  # clean: unclaimed below
        if sb is None:
            return 0.0
        va = self._rows(sa).copy_(self.encoder(a.pixels)).mean(0)
        vb = self._rows(sb).copy_(self.encoder(b.pixels)).mean(0)
        self.arena.unclaim(sa)
        self.arena.unclaim(sb)
        return float(torch.dot(va, vb))

    def clear(self) -> None:
        while self.spans:
            _, span = self.spans.popitem()
            self.arena.unclaim(span)
        self.users.clear()
