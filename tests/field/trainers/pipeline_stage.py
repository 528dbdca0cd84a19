"""1F1B pipeline stage with a bounded number of in-flight microbatches.

A microbatch needs one credit (bounds memory) and one activation frame (holds the
stage input until its backward has run).
"""
from __future__ import annotations

import logging
import queue
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional

import torch

log = logging.getLogger("pipeline")


@dataclass
class Frame:
    index: int
    tensor: torch.Tensor
    link: Optional["Frame"] = None


class FrameRing:
    """Frames chained through `link`; the head is the next one to hand out."""

    def __init__(self, n: int, shape, device):
        self._head: Optional[Frame] = None
        for i in range(n):
            f = Frame(i, torch.empty(shape, device=device))
            f.link, self._head = self._head, f

    def grab(self) -> Optional[Frame]:
        f = self._head  # clean: unlinked and returned
        if f is None:
            return None
        self._head, f.link = f.link, None
        return f

    def recycle(self, f: Frame) -> None:
        f.link, self._head = self._head, f


class PipelineStage:
    def __init__(self, module: torch.nn.Module, frames: FrameRing, credits: int, rank: int):
        self.module = module
        self.frames = frames
        self.rank = rank
        self.credits = threading.BoundedSemaphore(credits)
        self.live: "OrderedDict[int, Frame]" = OrderedDict()
        self.outputs: Dict[int, torch.Tensor] = {}
        self.rejected = 0

    # ---- steady state ----

    def forward_one(self, mb: int, x: torch.Tensor) -> torch.Tensor:
        self.credits.acquire()  # clean: near miss, backward_one() and abort() release one credit per live microbatch
        frame = self.frames.grab()  # clean: kept in live until backward_one() or abort(), None only raises
        if frame is None:
            self.credits.release()
            raise RuntimeError(f"stage {self.rank}: no frame for microbatch {mb}")
        frame.tensor.copy_(x)
        self.live[mb] = frame
        inp = frame.tensor.requires_grad_()
        out = self.module(inp)
        self.outputs[mb] = out
        return out.detach()

    def backward_one(self, mb: int, grad: torch.Tensor) -> torch.Tensor:
        frame = self.live.pop(mb)
        torch.autograd.backward(self.outputs.pop(mb), grad)
        dx = frame.tensor.grad.clone()
        frame.tensor.grad = None
        self.frames.recycle(frame)
        self.credits.release()
        return dx

    def abort(self) -> None:
        while self.live:
            _, frame = self.live.popitem(last=False)
            self.frames.recycle(frame)
            self.credits.release()
        self.outputs.clear()

    # ---- opportunistic variants ----

    def try_forward(self, mb: int, x: torch.Tensor) -> Optional[torch.Tensor]:
        """Used by the interleaved schedule, which must never block."""
        if not self.credits.acquire(blocking=False):  # leak: with no frame left the method returns None and keeps the credit
            return None
        frame = self.frames.grab()  # clean: stored in live unless None
        if frame is None:
            self.rejected += 1
            return None
        frame.tensor.copy_(x)
        self.live[mb] = frame
        self.outputs[mb] = self.module(frame.tensor.requires_grad_())
        return self.outputs[mb].detach()

    def eval_one(self, x: torch.Tensor) -> torch.Tensor:
        with self.credits:  # clean: with block
            frame = self.frames.grab()  # clean: near miss, either path recycles it or there is none
            if frame is None:
                with torch.no_grad():
                    return self.module(x)
            frame.tensor.copy_(x)
            with torch.no_grad():
                out = self.module(frame.tensor)
            self.frames.recycle(frame)
            return out

    def rerun(self, mb: int, x: torch.Tensor) -> None:
        """Replace the input of a live microbatch after a loss spike was rolled back."""
        frame = self.frames.grab()  # leak: put into live over the frame the microbatch already holds
        if frame is None:
            return
        frame.tensor.copy_(x)
        self.live[mb] = frame
        self.outputs[mb] = self.module(frame.tensor.requires_grad_())


class StageWorker(threading.Thread):
    """Pulls commands from the scheduler; `weights_lock` is held while parameters are swapped."""

    def __init__(self, stage: PipelineStage, inbox: "queue.Queue[Any]", on_done: Callable[[int, torch.Tensor], None]):
        super().__init__(daemon=True, name=f"stage-{stage.rank}")
        self.stage = stage
        self.inbox = inbox
        self.on_done = on_done
        self.weights_lock = threading.Lock()

    def run(self) -> None:
        while True:
            cmd = self.inbox.get()
            if cmd is None:
                self.stage.abort()
                return
            kind, mb, payload = cmd
            if kind == "fwd":
                self.on_done(mb, self.stage.forward_one(mb, payload))  # clean: the stage keeps credit and frame until backward or abort
            elif kind == "bwd":
                self.on_done(mb, self.stage.backward_one(mb, payload))
            elif kind == "swap":
                self.swap(payload)

    def swap(self, state: Dict[str, torch.Tensor]) -> bool:
        self.weights_lock.acquire()  # leak: unexpected keys return False with the lock held
        current = self.stage.module.state_dict()
        if state.keys() - current.keys():
            log.error("unexpected keys in swapped weights")
            return False
        self.stage.module.load_state_dict(state, strict=False)
        self.weights_lock.release()
        return True

    def snapshot(self, timeout: float) -> Optional[Dict[str, torch.Tensor]]:
        if not self.weights_lock.acquire(timeout=timeout):  # clean: near miss, the only return without release is the timeout
            return None
        try:
            return {k: v.clone() for k, v in self.stage.module.state_dict().items()}
        finally:
            self.weights_lock.release()


def warmup(stage: PipelineStage, batches: List[torch.Tensor]) -> None:
    """Touch every kernel once before the clock starts."""
    for mb, x in enumerate(batches):
        out = stage.forward_one(mb, x)  # clean: near miss, aborted below after the loop whatever happened in it
        if not torch.isfinite(out).all():
            log.warning("non-finite warmup output on microbatch %d", mb)
            break
    stage.abort()


def calibrate(stage: PipelineStage, x: torch.Tensor) -> float:
    stage.credits.acquire()  # clean: released on the last line but one
    frame = stage.frames.grab()  # leak: never recycled, only the credit is released
    peak = 0.0
    if frame is not None:
        frame.tensor.copy_(x)
        peak = float(frame.tensor.abs().max())
    stage.credits.release()
    return peak
