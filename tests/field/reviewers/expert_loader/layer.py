"""The MoE layer which uses pinned frames."""
from __future__ import annotations

import contextlib
from typing import Iterator

import torch

from .frames import Frame
from .loader import ExpertLoader


class OffloadedMoE:
    def __init__(self, loader: ExpertLoader, num_experts: int):
        self.loader = loader
        self.num_experts = num_experts
        self.always: list[Frame] = []
        self.shared: Frame | None = None

    @contextlib.contextmanager
    def expert(self, e: int) -> Iterator[torch.Tensor | None]:
        frame = self.loader.ensure(e)  # clean: unpinned by the finally
        try:
            yield None if frame is None else frame.weight
        finally:
            if frame is not None:
                self.loader.cache.unpin(frame)

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        out = torch.zeros_like(x)
        for e in chosen:
            with self.expert(e) as w:  # clean: near miss, the continue leaves through the context manager
                if w is None:
                    continue
                out += x @ w
        return out

    def forward_top1(self, x: torch.Tensor, e: int, scale: float) -> torch.Tensor:
        frame = self.loader.ensure(e)  # leak: scale zero returns before the unpin
        if frame is None:
            return x
        if scale == 0.0:
            return x
        out = (x @ frame.weight) * scale
        self.loader.cache.unpin(frame)
        return out

    def forward_all(self, x: torch.Tensor) -> torch.Tensor | None:
        held: list[Frame] = []
        out: torch.Tensor | None = torch.zeros_like(x)
        for e in range(self.num_experts):
            frame = self.loader.ensure(e)  # clean: near miss, the break leads to the loop that unpins all of `held`
            if frame is None:
                out = None
                break
            held.append(frame)
            out += x @ frame.weight
        for frame in held:
            self.loader.cache.unpin(frame)
        return out

    def pin_always(self, experts: list[int]) -> None:
        for e in experts:
            frame = self.loader.ensure(e)  # clean: near miss, held in `always` until unload()
            if frame is not None:
                self.always.append(frame)

    def pin_shared(self, e: int) -> bool:
        self.shared = self.loader.ensure(e)  # leak: unload() sets `shared` to None without unpinning it
        return self.shared is not None

    def unload(self) -> None:
        while self.always:
            self.loader.cache.unpin(self.always.pop())
        self.shared = None
