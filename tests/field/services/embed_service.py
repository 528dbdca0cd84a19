"""Embedding micro-service: HTTP handlers in front of one encoder."""
from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Deque, Dict, List, Optional

import torch

log = logging.getLogger("embed")


@dataclass
class EmbedConfig:
    max_tokens: int = 512
    hidden: int = 768
    staging: int = 16
    normalise: bool = True


class StagingPool:
    """Pinned int64 rows that a request is tokenised into."""

    def __init__(self, count: int, width: int) -> None:
        self._rows: Deque[torch.Tensor] = deque(
            torch.zeros(width, dtype=torch.long) for _ in range(count)
        )

    def borrow(self) -> Optional[torch.Tensor]:
        if not self._rows:
            return None
        return self._rows.popleft()  # clean: handed to the caller

    def give_back(self, row: torch.Tensor) -> None:
        row.zero_()
        self._rows.append(row)

    def __len__(self) -> int:
        return len(self._rows)


@dataclass
class Response:
    status: int
    body: Dict[str, Any] = field(default_factory=dict)


class EmbedService:
    def __init__(self, cfg: EmbedConfig, model: torch.nn.Module) -> None:
        self.cfg = cfg
        self.model = model
        self.staging = StagingPool(cfg.staging, cfg.max_tokens)
        self._gpu = asyncio.Lock()

    def _tokenise(self, text: str, row: torch.Tensor) -> int:
        ids = [ord(c) % 30000 for c in text[: self.cfg.max_tokens]]
        for i, t in enumerate(ids):
            row[i] = t
        return len(ids)

    async def handle_embed(self, body: bytes) -> Response:
        doc = json.loads(body)
        row = self.staging.borrow()  # clean: near miss, the None branch has nothing to return and finally does the rest
        if row is None:
            return Response(503, {"error": "busy"})
        try:
            n = self._tokenise(doc["text"], row)
            if n == 0:
                return Response(400, {"error": "empty"})
            async with self._gpu:
                vec = await asyncio.to_thread(self.model, row[:n])
            return Response(200, {"embedding": vec.tolist()})
        finally:
            self.staging.give_back(row)

    async def handle_count(self, body: bytes) -> Response:
        doc = json.loads(body)
        row = self.staging.borrow()  # leak: the over-length answer returns without giving the row back
        if row is None:
            return Response(503)
        n = self._tokenise(doc.get("text", ""), row)
        if n >= self.cfg.max_tokens:
            log.info("text of %d tokens refused", n)
            return Response(413, {"error": "too long", "tokens": n})
        self.staging.give_back(row)
        return Response(200, {"tokens": n})

    async def handle_batch(self, body: bytes) -> Response:
        texts: List[str] = json.loads(body)["texts"]
        rows: List[torch.Tensor] = []
        lengths: List[int] = []
        try:
            for text in texts:
                row = self.staging.borrow()  # clean: near miss, early return passes through finally
                if row is None:
                    return Response(503, {"error": "busy"})
                rows.append(row)
                lengths.append(self._tokenise(text, row))
            stacked = torch.stack(rows)
            async with self._gpu:
                vecs = await asyncio.to_thread(self.model, stacked)
            return Response(200, {"embeddings": vecs.tolist(), "lengths": lengths})
        finally:
            for row in rows:
                self.staging.give_back(row)

    async def handle_similarity(self, body: bytes) -> Response:
        doc = json.loads(body)
        left = self.staging.borrow()  # leak: kept when the second row cannot be had
        if left is None:
            return Response(503)
        right = self.staging.borrow()  # clean: returned on the only path past the check
        if right is None:
            return Response(503, {"error": "busy", "free": len(self.staging)})
        self._tokenise(doc["a"], left)
        self._tokenise(doc["b"], right)
        async with self._gpu:
            a, b = self.model(left), self.model(right)
        score = torch.nn.functional.cosine_similarity(a, b, dim=-1).item()
        self.staging.give_back(left)
        self.staging.give_back(right)
        return Response(200, {"score": score})

    async def warm_up(self, rounds: int = 3) -> None:
        for i in range(rounds):
            row = self.staging.borrow()  # leak: `row + 1` rebinds the name, the pooled row is gone
            if row is None:
                break
            row = row + 1
            self.model(row)
            log.debug("warm-up %d", i)

    async def health(self) -> Response:
        probe = self.staging.borrow()  # clean: near miss, in-place add keeps the same tensor
        if probe is not None:
            probe += 1
            ok = bool(probe.sum() > 0)
            self.staging.give_back(probe)
            return Response(200 if ok else 500)
        return Response(503)
