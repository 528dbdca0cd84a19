from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import nn


class SamplingParams(NamedTuple):
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    logprobs: bool = False


class BufferStack:
    def __init__(self, rows: int, vocab: int, depth: int) -> None:
        self._s = [torch.empty(rows, vocab) for _ in range(depth)]
        self.depth = depth

    def push(self, t: torch.Tensor) -> None:
        if len(self._s) >= self.depth:
            raise AssertionError("more buffers than were made")
        self._s.append(t)

    def pull(self) -> torch.Tensor:
        return self._s.pop()

    def pull_or_none(self) -> Optional[torch.Tensor]:
        return self._s.pop() if self._s else None


class Sampler(nn.Module):
    def __init__(self, stack: BufferStack, keep_probs: bool = False) -> None:
        super().__init__()
        self.stack = stack
        self.keep_probs = keep_probs
        self.last_probs: Optional[torch.Tensor] = None

    def _scaled(self, logits: torch.Tensor, temp: float) -> torch.Tensor:
        buf = self.stack.pull()  # clean: handed to the caller
        torch.div(logits, max(temp, 1e-5), out=buf)
        return buf

    def _masked(self, logits: torch.Tensor, p: SamplingParams) -> torch.Tensor:
        buf = self._scaled(logits, p.temperature)  # clean: handed on, only masked in place
        if p.top_k > 0:
            kth = torch.topk(buf, p.top_k, dim=-1).values[:, -1:]
            buf.masked_fill_(buf < kth, float("-inf"))
        return buf

    def _probs(self, logits: torch.Tensor, p: SamplingParams) -> torch.Tensor:
        buf = self._masked(logits, p)  # leak: the softmax is a new tensor and that is what the caller gets
        return torch.softmax(buf, dim=-1)

    def _probs_out(self, logits: torch.Tensor, p: SamplingParams) -> torch.Tensor:
        buf = self._masked(logits, p)  # clean: near miss, the softmax is written into the buffer that is returned
        torch.softmax(buf, dim=-1, out=buf)
        return buf

    def forward(self, logits: torch.Tensor, p: SamplingParams) -> torch.Tensor:
        probs = self._probs_out(logits, p)  # clean: near miss, kept in the field or pushed back
        tok = torch.multinomial(probs, 1)
        if self.keep_probs:
            self.release_probs()
            self.last_probs = probs
        else:
            self.stack.push(probs)
        return tok

    def release_probs(self) -> None:
        if self.last_probs is not None:
            self.stack.push(self.last_probs)
            self.last_probs = None

    def greedy(self, logits: torch.Tensor, p: SamplingParams) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        buf = self._scaled(logits, 1.0)  # leak: with logprobs the early return leaves it out
        tok = buf.argmax(dim=-1)
        if p.logprobs:
            return tok, torch.log_softmax(buf, dim=-1)
        self.stack.push(buf)
        return tok, None

    def entropy(self, logits: torch.Tensor) -> torch.Tensor:
        buf = self._scaled(logits, 1.0)  # clean: near miss, lp is another tensor and buf keeps its name
        lp = buf.log_softmax(dim=-1)
        buf.copy_(lp)
        buf.exp_().mul_(lp)
        res = -buf.sum(dim=-1)
        self.stack.push(buf)
        return res

    def perplexity(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        buf = self._scaled(logits, 1.0)  # leak: rebound by log_softmax, the new tensor is pushed
        buf = buf.log_softmax(dim=-1)
        nll = -buf.gather(1, target[:, None]).mean()
        self.stack.push(buf)
        return nll.exp()

    def mix(self, a: torch.Tensor, b: torch.Tensor, w: float) -> Optional[torch.Tensor]:
        x = self.stack.pull_or_none()  # clean: pushed back when there is no second one, and at the end
        if x is None:
            return None
        y = self.stack.pull_or_none()  # clean: pushed back at the end
        if y is None:
            self.stack.push(x)
            return None
        torch.softmax(a, -1, out=x)
        torch.softmax(b, -1, out=y)
        res = torch.lerp(x, y, w)
        self.stack.push(y)
        self.stack.push(x)
        return res

    def mix_weighted(self, parts: List[Tuple[float, torch.Tensor]]) -> Optional[torch.Tensor]:
        acc = self.stack.pull_or_none()  # leak: the exit for weights that sum to zero forgets it
        if acc is None:
            return None
        acc.zero_()
        total = 0.0
        for w, logits in parts:
            tmp = self._scaled(logits, 1.0)  # clean: pushed back in each round
            acc.add_(tmp, alpha=w)
            total += w
            self.stack.push(tmp)
        if total == 0.0:
            return None
        res = acc / total
        self.stack.push(acc)
        return res

    def penalize(self, logits: torch.Tensor, counts: Dict[int, int], fn: Callable[[int], float]) -> torch.Tensor:
        buf = self._scaled(logits, 1.0)  # clean: near miss, the alias is pushed back
        work = buf
        for tok, n in counts.items():
            work[:, tok] -= fn(n)
        out = work.clone()
        self.stack.push(work)
        return out

    def debug_shapes(self, logits: torch.Tensor) -> Tuple[int, ...]:
        return tuple(self._masked(logits, SamplingParams(top_k=4)).shape)  # leak: only the shape is kept
