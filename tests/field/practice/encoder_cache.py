"""Slots for vision/audio embeddings between the encoder and the language model."""
from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import nn

log = logging.getLogger("mm.encoder_cache")


class Modality(str, Enum):
    IMAGE = "image"
    AUDIO = "audio"
    TEXT = "text"


@dataclass
class MMItem:
    modality: Modality
    pixels: torch.Tensor | None
    digest: str
    slot: int | None = None


@dataclass
class MMRequest:
    rid: str
    items: list[MMItem] = field(default_factory=list)


class EmbeddingSlots:
    """Bitmap of slots in one big embedding table."""

    def __init__(self, n: int, tokens: int, dim: int, device: str) -> None:
        self.table = torch.zeros(n, tokens, dim, device=device)
        self.used = [False] * n

    def obtain(self) -> int:
        for i, u in enumerate(self.used):
            if not u:
                self.used[i] = True
                return i
        return -1

    def recycle(self, slot: int) -> None:
        self.used[slot] = False


class EncoderRunner:
    def __init__(self, tower: nn.Module, slots: EmbeddingSlots, max_tokens: int) -> None:
        self.tower = tower
        self.slots = slots
        self.max_tokens = max_tokens
        self.by_digest: dict[str, int] = {}

    @torch.inference_mode()
    def encode_item(self, item: MMItem) -> bool:
        if item.slot is not None:
            return True
        slot = self.slots.obtain()  # leak: an embedding that is too long returns with the slot taken
        if slot < 0:
            return False
        emb = self.tower(item.pixels)
        if emb.shape[0] > self.max_tokens:
            log.error("item %s has %d tokens", item.digest, emb.shape[0])
            return False
        self.slots.table[slot, : emb.shape[0]].copy_(emb)
        item.slot = slot
        return True

    def release_request(self, req: MMRequest) -> None:
        for item in req.items:
            if item.slot is not None:
                self.slots.recycle(item.slot)
                item.slot = None

    def reserve_for(self, req: MMRequest) -> bool:
        taken: list[MMItem] = []
        for item in req.items:
            if item.modality is Modality.TEXT or item.slot is not None:
                continue
            slot = self.slots.obtain()  # clean: near miss, all items taken so far are rolled back
            if slot < 0:
                for t in taken:
                    self.slots.recycle(t.slot)
                    t.slot = None
                return False
            item.slot = slot
            taken.append(item)
        return True

    def reserve_first(self, req: MMRequest, k: int) -> list[int]:
        got: list[int] = []
        for _ in range(k):
            slot = self.slots.obtain()  # leak: when the slots run out the ones in `got` are forgotten
            if slot < 0:
                return []
            got.append(slot)
        todo = [item for item in req.items if item.slot is None]
        for item, slot in zip(todo, got):
            item.slot = slot
        for slot in got[len(todo):]:
            self.slots.recycle(slot)
        return got

    def probe(self, pixels: torch.Tensor) -> int:
        """Number of tokens the tower makes of an input."""
        slot = self.slots.obtain()  # clean: recycled on the only path that got one
        if slot == -1:
            return 0
        view = self.slots.table[slot]
        n = self.tower(pixels).shape[0]
        view[:n].zero_()
        self.slots.recycle(slot)
        return n

    def cached(self, item: MMItem) -> int:
        slot = self.by_digest.get(item.digest)
        if slot is not None:
            return slot
        slot = self.slots.obtain()  # clean: kept by digest, purge() recycles every slot
        if slot >= 0:
            self.slots.table[slot].zero_()
            self.by_digest[item.digest] = slot
        return slot

    def purge(self) -> None:
        while self.by_digest:
            _, slot = self.by_digest.popitem()
            self.slots.recycle(slot)


class AudioRunner(EncoderRunner):
    def __init__(self, *args, **kw) -> None:
        super().__init__(*args, **kw)
        self.windows: list[int] = []

    def open_window(self) -> bool:
        slot = self.slots.obtain()  # leak: reset() clears the windows without recycling
        if slot < 0:
            return False
        self.windows.append(slot)
        return True

    def reset(self) -> None:
        self.windows.clear()

    def stitch(self, parts: list[torch.Tensor]) -> torch.Tensor | None:
        slot = self.slots.obtain()  # clean: near miss, the break goes on to the recycle
        if slot < 0:
            return None
        pos, out = 0, None
        for p in parts:
            if pos + len(p) > self.max_tokens:
                break
            self.slots.table[slot, pos: pos + len(p)] = p
            pos += len(p)
        else:
            out = self.slots.table[slot, :pos].clone()
        self.slots.recycle(slot)
        return out

    def blend(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        sa = self.slots.obtain()  # leak: kept when the second slot cannot be had
        sb = self.slots.obtain()  # clean: near miss, nothing was taken when it is negative
        if sa < 0:
            if sb >= 0:
                self.slots.recycle(sb)
            raise RuntimeError("no slot")
        if sb < 0:
            raise RuntimeError("no second slot")
        ta, tb = self.slots.table[sa], self.slots.table[sb]
        ta[: len(a)] = a
        tb[: len(b)] = b
        res = 0.5 * (ta + tb)
        self.slots.recycle(sa)
        self.slots.recycle(sb)
        return res
