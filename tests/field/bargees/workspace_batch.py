"""Embedding batches on rented workspace tensors."""
from __future__ import annotations

from collections import defaultdict

import torch


class Workspace:
    """Recycles flat tensors by their length."""

    def __init__(self, device: str = "cuda") -> None:
        self._device = device
        self._shelf: dict[int, list[torch.Tensor]] = defaultdict(list)
        self.outstanding = 0

    def rent(self, n: int) -> torch.Tensor:
        self.outstanding += 1
        shelf = self._shelf[n]
        return shelf.pop() if shelf else torch.empty(n, device=self._device)

    def rent_many(self, count: int, n: int) -> list[torch.Tensor]:
        return [self.rent(n) for _ in range(count)]  # clean: the list is the caller's

    def settle(self, t: torch.Tensor) -> None:
        self.outstanding -= 1
        self._shelf[t.numel()].append(t)


class Embedder:
    def __init__(self, ws: Workspace, model, width: int, max_batch: int) -> None:
        self.ws = ws
        self.model = model
        self.width = width
        self.max_batch = max_batch

    def embed(self, texts: list[str]) -> list[list[float]]:
        texts = texts[: self.max_batch]
        lanes = self.ws.rent_many(self.max_batch, self.width)  # leak: lanes behind the last text are lost
        out = []
        for text, lane in zip(texts, lanes):
            self.model.encode_into(text, lane)
            out.append(lane.tolist())
            self.ws.settle(lane)
        return out

    def embed_padded(self, texts: list[str]) -> list[list[float]]:
        texts = texts[: self.max_batch]
        lanes = self.ws.rent_many(self.max_batch, self.width)  # clean: near miss, unused lanes are settled
        out = []
        for text, lane in zip(texts, lanes):
            self.model.encode_into(text, lane)
            out.append(lane.tolist())
            self.ws.settle(lane)
        for lane in lanes[len(texts):]:
            self.ws.settle(lane)
        return out

    def embed_long(self, chunks: list[str]) -> torch.Tensor:
        pieces: list[torch.Tensor] = []
        for chunk in chunks:
            piece = self.ws.rent(self.width)  # leak: cat copies the pieces, the list of them is dropped
            self.model.encode_into(chunk, piece)
            pieces.append(piece)
        return torch.cat(pieces)

    def embed_mean(self, chunks: list[str]) -> torch.Tensor:
        pieces: list[torch.Tensor] = []
        for chunk in chunks:
            piece = self.ws.rent(self.width)  # clean: near miss, stack copies, then the list is emptied
            self.model.encode_into(chunk, piece)
            pieces.append(piece)
        mean = torch.stack(pieces).mean(dim=0)
        while pieces:
            self.ws.settle(pieces.pop())
        return mean

    def rerank(self, query: str, docs: list[str], top: int) -> list[str]:
        scored: list[tuple[float, str, torch.Tensor]] = []
        base = self.ws.rent(self.width)  # clean: settled below
        self.model.encode_into(query, base)
        for doc in docs:
            vec = self.ws.rent(self.width)  # leak: vectors behind the top are cut off and never settled
            self.model.encode_into(doc, vec)
            scored.append((float(torch.dot(base, vec)), doc, vec))
        self.ws.settle(base)
        scored.sort(key=lambda item: item[0], reverse=True)
        names = []
        for _, doc, vec in scored[:top]:
            names.append(doc)
            self.ws.settle(vec)
        return names


class ScoreTable:
    """A growing table of scores; rows are appended."""

    def __init__(self, ws: Workspace, n: int = 1024) -> None:
        self.ws = ws
        self.n = 0
        self.table = ws.rent(n)  # leak: append copies into a larger one and puts it over this
        self.index = ws.rent(n)  # clean: near miss, append settles the small one before it is put over

    def append(self, value: float) -> None:
        if self.n == self.table.numel():
            wider = self.ws.rent(2 * self.n)  # leak: lost at the next growth, only the last table is settled
            wider[: self.n] = self.table
            self.table = wider
            longer = self.ws.rent(2 * self.n)  # clean: becomes self.index
            longer[: self.n] = self.index
            self.ws.settle(self.index)
            self.index = longer
        self.table[self.n] = value
        self.index[self.n] = self.n
        self.n += 1

    def close(self) -> None:
        self.ws.settle(self.table)
        self.ws.settle(self.index)


class DoubleBuffer:
    def __init__(self, ws: Workspace, n: int) -> None:
        self.ws = ws
        self.n = n
        self.front = ws.rent(n)  # leak: flip puts the back over the front and settles neither
        self.back = ws.rent(n)  # leak: becomes the front, and is lost at the second flip

    def flip(self, rows: torch.Tensor) -> None:
        self.back.copy_(rows)
        self.front, self.back = self.back, self.ws.rent(self.n)  # leak: lost two flips later

    def close(self) -> None:
        self.ws.settle(self.front)
        self.ws.settle(self.back)


class PingPong:
    def __init__(self, ws: Workspace, n: int) -> None:
        self.ws = ws
        self.front = ws.rent(n)  # clean: near miss, turn swaps the two and loses none, close settles both
        self.back = ws.rent(n)  # clean: near miss, turn swaps the two and loses none, close settles both

    def turn(self, rows: torch.Tensor) -> None:
        self.back.copy_(rows)
        self.front, self.back = self.back, self.front

    def close(self) -> None:
        for half in (self.front, self.back):
            self.ws.settle(half)
