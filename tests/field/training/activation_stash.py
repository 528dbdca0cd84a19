"""Activation stash for pipelined training: slots hold activations between forward and backward."""
import logging
from typing import Any, Dict, List, Optional

import torch

logger = logging.getLogger(__name__)


class StashFull(RuntimeError):
    pass


class SlotArena:
    def __init__(self, n_slots: int, slot_shape, device="cpu"):
        self.mem = torch.empty((n_slots, *slot_shape), device=device)
        self.used = [False] * n_slots

    def reserve(self) -> int:
        for i, u in enumerate(self.used):
            if not u:
                self.used[i] = True
                return i
        raise StashFull("no slot left")

    def unreserve(self, slot: int) -> None:
        assert self.used[slot]
        self.used[slot] = False

    def __getitem__(self, slot: int) -> torch.Tensor:
        return self.mem[slot]


class ActivationStash:
    def __init__(self, arena: SlotArena, num_micro: int):
        self.arena = arena
        self.num_micro = num_micro
        self.by_micro: Dict[int, int] = {}
        self.debug_slots: List[int] = []
        self.extra: Dict[int, int] = {}

    def push(self, micro: int, act: torch.Tensor) -> None:
        slot = self.arena.reserve()  # clean: kept per micro batch, taken out by pop() and reset()
        self.arena[slot].copy_(act)
        self.by_micro[micro] = slot

    def pop(self, micro: int) -> torch.Tensor:
        slot = self.by_micro.pop(micro)
        out = self.arena[slot].clone()
        self.arena.unreserve(slot)
        return out

    def snapshot(self, act: torch.Tensor) -> None:
        slot = self.arena.reserve()  # leak: drop_debug() clears the list without giving the slots back
        self.arena[slot].copy_(act)
        self.debug_slots.append(slot)

    def drop_debug(self) -> None:
        self.debug_slots.clear()

    def push_aux(self, micro: int, act: torch.Tensor) -> None:
        slot = self.arena.reserve()  # clean: near miss, the table is cleared only after every slot went back
        self.arena[slot].copy_(act)
        self.extra[micro] = slot

    def drop_aux(self) -> None:
        for slot in self.extra.values():
            self.arena.unreserve(slot)
        self.extra.clear()

    def reset(self) -> None:
        while self.by_micro:
            _, slot = self.by_micro.popitem()
            self.arena.unreserve(slot)
        self.drop_aux()
        self.drop_debug()

    def checked_forward(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        slot = self.arena.reserve()  # leak: the explicit raise on a non-finite output keeps the slot
        buf = self.arena[slot]
        buf.copy_(x)
        y = layer(buf)
        if not torch.isfinite(y).all():
            raise FloatingPointError("activation overflow")
        self.arena.unreserve(slot)
        return y

    def safe_forward(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        slot = self.arena.reserve()  # clean: near miss, the raise passes through finally
        try:
            buf = self.arena[slot]
            buf.copy_(x)
            y = layer(buf)
            if not torch.isfinite(y).all():
                raise FloatingPointError("activation overflow")
            return y
        finally:
            self.arena.unreserve(slot)

    def try_forward(self, layer: torch.nn.Module, x: torch.Tensor) -> Optional[torch.Tensor]:
        slot = self.arena.reserve()  # leak: the handler swallows the error and forgets the slot
        try:
            self.arena[slot].copy_(x)
            y = layer(self.arena[slot])
            self.arena.unreserve(slot)
            return y
        except RuntimeError as exc:
            logger.warning("forward failed: %s", exc)
            return None

    def retry_forward(self, layer: torch.nn.Module, x: torch.Tensor, attempts: int = 3) -> Optional[torch.Tensor]:
        for attempt in range(attempts):
            slot = self.arena.reserve()  # clean: near miss, each attempt returns its slot in both branches
            try:
                self.arena[slot].copy_(x)
                y = layer(self.arena[slot])
            except RuntimeError as exc:
                logger.warning("attempt %d failed: %s", attempt, exc)
                self.arena.unreserve(slot)
                continue
            self.arena.unreserve(slot)
            return y
        return None


class RecomputeContext:
    """Saved for backward by the checkpoint function."""

    def __init__(self, arena: SlotArena, inputs: List[torch.Tensor]):
        self.arena = arena
        self.slots: List[int] = []
        for t in inputs:
            s = arena.reserve()  # clean: the whole list goes back in finish()
            arena[s].copy_(t)
            self.slots.append(s)
        self.mask_slot = arena.reserve()  # leak: finish() forgets the mask slot

    def replay(self, fn: Any) -> Any:
        return fn(*(self.arena[s] for s in self.slots))

    def finish(self) -> None:
        for s in self.slots:
            self.arena.unreserve(s)
        self.slots = []
