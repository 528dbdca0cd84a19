"""Speculative decoding: draft and target scratch tensors, per-request slots."""
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch


class ScratchPool:
    """Scratch tensors grouped in power-of-two size classes."""

    def __init__(self, device="cpu"):
        self._device = device
        self._classes = {}

    @staticmethod
    def _class_of(numel):
        return 1 << max(0, numel - 1).bit_length()

    def get_scratch(self, numel):
        cls = self._class_of(numel)
        bin_ = self._classes.setdefault(cls, [])
        if bin_:
            return bin_.pop()  # clean: returned
        return torch.empty(cls, device=self._device)

    def get_like(self, t):
        flat = self.get_scratch(t.numel())  # clean: the view goes to the caller, put_scratch finds the base
        return flat[: t.numel()].view(t.shape)

    def get_zeros(self, numel, reuse=True):
        cls = self._class_of(numel)
        for size in sorted(self._classes):
            if size >= cls and self._classes[size]:
                found = self._classes[size].pop()  # leak: with reuse off it is dropped for a fresh tensor
                if reuse:
                    return found.zero_()
                break
        return torch.zeros(cls, device=self._device)

    def put_scratch(self, t):
        base = t._base if t._base is not None else t
        self._classes.setdefault(base.numel(), []).append(base)


@dataclass
class Draft:
    request_id: int
    tokens: list = field(default_factory=list)
    probs: torch.Tensor = None
    scores: torch.Tensor = None


class Proposer(ABC):
    """Template: propose() owns the workspace, _fill() does the work."""

    def __init__(self, pool, k):
        self._pool = pool
        self._k = k

    def propose(self, request_id, prefix):
        draft = Draft(request_id)
        draft.probs = self._pool.get_scratch(self._k)  # clean: near miss, in the draft, which discard empties
        draft.tokens = self._fill(prefix, draft.probs)
        if not draft.tokens:
            self.discard(draft)
            return None
        return draft

    @abstractmethod
    def _fill(self, prefix, probs): ...

    def discard(self, draft):
        if draft.probs is not None:
            self._pool.put_scratch(draft.probs)
            draft.probs = None


class NgramProposer(Proposer):
    def _fill(self, prefix, probs):
        probs.fill_(1.0)
        if len(prefix) < 2:
            return []
        last = prefix[-1]
        for i in range(len(prefix) - 2, -1, -1):
            if prefix[i] == last:
                return prefix[i + 1 : i + 1 + self._k]
        return []


class ModelProposer(Proposer):
    def __init__(self, pool, k, model):
        super().__init__(pool, k)
        self._model = model

    def _fill(self, prefix, probs):
        tokens = list(prefix)
        logits = self._pool.get_scratch(self._model.vocab)  # clean: near miss, break still passes the put
        for step in range(self._k):
            self._model.forward(tokens, out=logits)
            best = int(logits.argmax())
            if best == self._model.eos:
                break
            probs[step] = torch.softmax(logits, 0)[best]
            tokens.append(best)
        self._pool.put_scratch(logits)
        return tokens[len(prefix) :]


class ScoringProposer(ModelProposer):
    def propose(self, request_id, prefix):
        draft = super().propose(request_id, prefix)  # clean: near miss, None or returned with the scores added
        if draft is None:
            return None
        draft.scores = self._pool.get_scratch(self._k)  # leak: the inherited discard only knows about probs
        draft.scores.copy_(draft.probs).log_()
        return draft


class Verifier:
    def __init__(self, pool, target):
        self._pool = pool
        self._target = target

    def _target_logits(self, prefix, n):
        out = self._pool.get_scratch(n * self._target.vocab)  # clean: returned as a view of it
        self._target.forward_many(prefix, out=out)
        return out[: n * self._target.vocab].view(n, self._target.vocab)

    def accept_greedy(self, proposer, prefix):
        draft = proposer.propose(0, prefix)  # clean: near miss, discarded on the early return and at the end
        if draft is None:
            return []
        if len(draft.tokens) == 1:
            proposer.discard(draft)
            return []
        logits = self._target_logits(prefix + draft.tokens, len(draft.tokens))  # leak: argmax rebinds the name before the put, which then gets the small tensor
        logits = logits.argmax(-1)
        kept = []
        for token, want in zip(draft.tokens, logits.tolist()):
            if token != want:
                break
            kept.append(token)
        self._pool.put_scratch(logits)
        proposer.discard(draft)
        return kept

    def accept_sampled(self, proposer, prefix, u):
        draft = proposer.propose(0, prefix)  # leak: the rejection of the first token returns without discard
        if draft is None:
            return []
        logits = self._target_logits(prefix + draft.tokens, len(draft.tokens))  # clean: put before any return
        probs = logits.softmax(-1)
        self._pool.put_scratch(logits)
        ratios = [float(probs[i, t] / draft.probs[i]) for i, t in enumerate(draft.tokens)]
        if ratios[0] < u[0]:
            return []
        kept = [t for t, r, x in zip(draft.tokens, ratios, u) if r >= x]
        proposer.discard(draft)
        return kept

    def entropy(self, prefix):
        logits = self._target_logits(prefix, 1)  # clean: put after use
        p = logits.softmax(-1)
        h = float(-(p * p.log()).sum())
        self._pool.put_scratch(logits)
        return h

    def perplexity(self, prefix, n):
        logp = self._target_logits(prefix, n).log_softmax(-1)  # leak: log_softmax makes a new tensor, the pooled one is dropped
        return float(torch.exp(-logp.max(-1).values.mean()))
