"""Knowledge distillation: teacher logits are kept in leased buffers until the student has used them."""
import logging
from collections import deque
from dataclasses import dataclass
from typing import Deque, Dict, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

logger = logging.getLogger(__name__)


@dataclass
class DistillConfig:
    vocab: int = 32000
    max_tokens: int = 512
    n_buffers: int = 4
    temperature: float = 2.0
    cache_teacher: bool = False
    queue_len: int = 2


class LogitBuffers:
    def __init__(self, cfg: DistillConfig):
        self.free = deque(torch.empty(cfg.max_tokens, cfg.vocab) for _ in range(cfg.n_buffers))

    def borrow_logits(self) -> Optional[Tensor]:
        return self.free.popleft() if self.free else None

    def hand_in(self, t: Tensor) -> None:
        self.free.append(t)


@dataclass
class TeacherOutput:
    step: int
    n: int
    buf: Tensor


class Distiller:
    def __init__(self, cfg: DistillConfig, teacher: nn.Module, student: nn.Module):
        self.cfg = cfg
        self.teacher = teacher
        self.student = student
        self.buffers = LogitBuffers(cfg)
        self.fifo: Deque[TeacherOutput] = deque()
        self.bounded: Deque[TeacherOutput] = deque(maxlen=cfg.queue_len)
        self.cached: Dict[int, TeacherOutput] = {}

    def run_teacher(self, step: int, x: Tensor) -> Optional[TeacherOutput]:
        buf = self.buffers.borrow_logits()  # clean: goes out inside the TeacherOutput
        if buf is None:
            return None
        with torch.no_grad():
            buf[: x.shape[0]].copy_(self.teacher(x))
        return TeacherOutput(step, x.shape[0], buf)

    def _kl(self, out: TeacherOutput, x: Tensor) -> Tensor:
        t = self.cfg.temperature
        p = F.softmax(out.buf[: out.n] / t, dim=-1)
        q = F.log_softmax(self.student(x) / t, dim=-1)
        return F.kl_div(q, p, reduction="batchmean") * t * t

    def loss(self, step: int, x: Tensor) -> Tensor:
        out = self.cached.get(step)
        if out is None:
            out = self.run_teacher(step, x)  # clean: near miss, cached for clear_cache or handed in at the end, by the same option
            if out is None:
                return torch.zeros(())
            if self.cfg.cache_teacher:
                self.cached[step] = out
        value = self._kl(out, x)
        if not self.cfg.cache_teacher:
            self.buffers.hand_in(out.buf)
        return value

    def clear_cache(self) -> None:
        for out in self.cached.values():
            self.buffers.hand_in(out.buf)
        self.cached.clear()

    def enqueue(self, step: int, x: Tensor) -> bool:
        out = self.run_teacher(step, x)  # clean: waits in the fifo for train_next and drain
        if out is None:
            return False
        self.fifo.append(out)
        return True

    def enqueue_bounded(self, step: int, x: Tensor) -> bool:
        out = self.run_teacher(step, x)  # leak: a full deque with maxlen drops its oldest entry silently
        if out is None:
            return False
        self.bounded.append(out)
        return True

    def train_next(self, x: Tensor) -> Optional[Tensor]:
        if not self.fifo:
            return None
        out = self.fifo.popleft()
        value = self._kl(out, x)
        self.buffers.hand_in(out.buf)
        return value

    def drain(self) -> None:
        for q in (self.fifo, self.bounded):
            while q:
                self.buffers.hand_in(q.popleft().buf)

    def soft_targets(self, step: int, x: Tensor) -> Optional[Tensor]:
        out = self.run_teacher(step, x)  # leak: softmax yields a new tensor, the output object ends here
        if out is None:
            return None
        return F.softmax(out.buf[: out.n] / self.cfg.temperature, dim=-1)

    def soft_targets_(self, step: int, x: Tensor) -> Optional[TeacherOutput]:
        out = self.run_teacher(step, x)  # clean: near miss, softmax is copied into the same buffer and the object is returned
        if out is None:
            return None
        out.buf[: out.n].copy_(F.softmax(out.buf[: out.n] / self.cfg.temperature, dim=-1))
        return out

    def agreement(self, step: int, x: Tensor) -> float:
        soft = self.soft_targets_(step, x)  # clean: handed in before the return
        if soft is None:
            return 0.0
        acc = (soft.buf[: soft.n].argmax(-1) == self.student(x).argmax(-1)).float().mean()
        self.buffers.hand_in(soft.buf)
        return float(acc)

    def entropy(self, step: int, x: Tensor) -> float:
        soft = self.soft_targets_(step, x)  # leak: the attribute is rebound to a product before it is handed in
        if soft is None:
            return 0.0
        soft.buf = soft.buf * soft.buf.clamp_min(1e-9).log()
        h = -float(soft.buf[: soft.n].sum()) / soft.n
        self.buffers.hand_in(soft.buf)
        return h

    def ensemble(self, xs: Dict[int, Tensor]) -> Optional[Tensor]:
        total: Optional[Tensor] = None
        for step, x in xs.items():
            out = self.run_teacher(step, x)  # leak: the first output becomes the running total and is then replaced
            if out is None:
                continue
            if total is None:
                total = out.buf
                continue
            total = total + out.buf
            self.buffers.hand_in(out.buf)
        return total

    def ensemble_mean(self, xs: Dict[int, Tensor]) -> Optional[Tensor]:
        total = torch.zeros(self.cfg.max_tokens, self.cfg.vocab)
        n = 0
        for step, x in xs.items():
            out = self.run_teacher(step, x)  # clean: added into a private total, handed in each round
            if out is None:
                continue
            total[: out.n] += out.buf[: out.n]
            n += 1
            self.buffers.hand_in(out.buf)
        return total / n if n else None
