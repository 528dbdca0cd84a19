"""The one-forward-one-backward schedule and its interleaved warm-up."""
from __future__ import annotations

import logging
from typing import Iterable, List, Optional

import torch

from .buffers import SlotTable
from .stage import Stage

log = logging.getLogger(__name__)


def run_1f1b(stage: Stage, batches: List[torch.Tensor]) -> List[torch.Tensor]:
    n = len(batches)
    warm = min(stage.n_stages - stage.index - 1, n)
    losses: List[torch.Tensor] = []
    for mb in range(warm):
        stage.forward_one(mb, batches[mb])
    for mb in range(warm, n):
        out = stage.forward_one(mb, batches[mb])
        if stage.is_last and out is not None:
            losses.append(out.detach().mean())
        stage.backward_one(mb - warm)
    for mb in range(n - warm, n):
        stage.backward_one(mb)
    stage.drain_sends()
    return losses


def probe_bandwidth(stage: Stage, rounds: int) -> float:
    """Receive a few messages and tell how many bytes went through."""
    moved = 0
    msg = stage.recv_from(stage.index - 1)  # leak: rebound in the loop before any checkin
    for _ in range(rounds):
        moved += msg.numel() * msg.element_size()
        msg = stage.recv_from(stage.index - 1)  # leak: each round rebinds it, only the last is checked in
    stage.p2p.checkin(msg)
    return float(moved)


def probe_latency(stage: Stage, rounds: int) -> int:
    seen = 0
    msg = stage.recv_from(stage.index - 1)  # clean: checked in at the top of the loop or after it
    for _ in range(rounds):
        seen += int(msg.view(-1)[0] != 0)
        stage.p2p.checkin(msg)
        msg = stage.recv_from(stage.index - 1)  # clean: near miss, rebound only after the checkin
    stage.p2p.checkin(msg)
    return seen


def stage_inputs(table: SlotTable, micro: Iterable[torch.Tensor], chunk: int) -> Optional[torch.Tensor]:
    """Copy up to `chunk` micro-batches into slots and return their stacked sum."""
    slots = table.claim_run(chunk)  # clean: an empty list holds nothing, the rest is vacated below
    if not slots:
        return None
    total = None
    for slot, tensor in zip(slots, micro):
        row = table.view(slot)
        row.copy_(tensor)
        total = row.clone() if total is None else total.add_(row)
    for slot in slots:
        table.vacate(slot)
    return total


def calibrate(table: SlotTable, module, tolerance: float) -> float:
    pair = table.claim_pair()  # leak: the output slot of the pair is not vacated
    if pair is None:
        return 0.0
    src, dst = pair
    table.view(src).normal_()
    table.view(dst).copy_(module(table.view(src)))
    err = float((table.view(dst) - module(table.view(src))).abs().max())
    if err > tolerance:
        log.warning("stage is not deterministic: %.3g", err)
    table.vacate(src)
    return err
