"""Speculative decoding: draft and target runners with a KV region each, and a logits ring."""
from __future__ import annotations

import heapq
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch


class Region(NamedTuple):
    start: int
    size: int

    @property
    def end(self) -> int:
        return self.start + self.size


class RegionAllocator:
    """First fit over a heap of holes."""

    def __init__(self, total: int):
        self.total = total
        self._holes: List[Tuple[int, int]] = [(0, total)]

    def reserve(self, size: int) -> Optional[Region]:
        skipped = []
        found = None
        while self._holes:
            start, length = heapq.heappop(self._holes)  # clean: near miss, holes that do not fit are pushed back below
            if length < size:
                skipped.append((start, length))
                continue
            found = Region(start, size)
            if length > size:
                heapq.heappush(self._holes, (start + size, length - size))
            break
        for hole in skipped:
            heapq.heappush(self._holes, hole)
        return found

    def reserve_aligned(self, size: int, align: int) -> Optional[Region]:
        start, length = heapq.heappop(self._holes) if self._holes else (0, 0)  # leak: the padding before the aligned start is never a hole again
        base = (start + align - 1) // align * align
        if base + size > start + length:
            if length:
                heapq.heappush(self._holes, (start, length))
            return None
        rest = start + length - (base + size)
        if rest:
            heapq.heappush(self._holes, (base + size, rest))
        return Region(base, size)

    def unreserve(self, region: Region) -> None:
        heapq.heappush(self._holes, (region.start, region.size))

    def truncate(self, region: Region, size: int) -> Region:
        """Give the tail of a region back and keep the head."""
        if size < region.size:
            heapq.heappush(self._holes, (region.start + size, region.size - size))
        return Region(region.start, min(size, region.size))


class LogitsRing:
    def __init__(self, depth: int, rows: int, vocab: int):
        self._bufs = [torch.empty(rows, vocab) for _ in range(depth)]

    def claim(self) -> torch.Tensor:
        if not self._bufs:
            raise RuntimeError("logits ring exhausted")
        return self._bufs.pop()

    def recycle(self, buf: torch.Tensor) -> None:
        self._bufs.append(buf)


class Model:
    def forward(self, tokens: List[int], region: Region, out: torch.Tensor) -> int:
        raise NotImplementedError

    def vocab_limit(self) -> int:
        raise NotImplementedError


class Session:
    def __init__(self, sid: str, draft: Region, target: Region):
        self.sid = sid
        self.draft = draft
        self.target = target
        self.tree: Optional[Region] = None
        self.last_logits: Optional[torch.Tensor] = None


class SpecDecoder:
    def __init__(self, draft: Model, target: Model, draft_kv: RegionAllocator, target_kv: RegionAllocator, ring: LogitsRing):
        self.draft = draft
        self.target = target
        self.draft_kv = draft_kv
        self.target_kv = target_kv
        self.ring = ring
        self.sessions: Dict[str, Session] = {}

    def open(self, sid: str, length: int, k: int) -> Optional[Session]:
        if sid in self.sessions:
            return self.sessions[sid]
        d = self.draft_kv.reserve(length + k)  # leak: no rollback when the target region is refused
        if d is None:
            return None
        t = self.target_kv.reserve(length + k + 1)  # clean: kept by the session
        if t is None:
            return None
        s = Session(sid, d, t)
        self.sessions[sid] = s
        return s

    def open_or_none(self, sid: str, length: int, k: int) -> Optional[Session]:
        if sid in self.sessions:
            return self.sessions[sid]
        d = self.draft_kv.reserve(length + k)  # clean: near miss, unreserved when only one of the two is there
        t = self.target_kv.reserve(length + k + 1)  # clean: unreserved when only one of the two is there
        if d is None or t is None:
            if d is not None:
                self.draft_kv.unreserve(d)
            if t is not None:
                self.target_kv.unreserve(t)
            return None
        s = self.sessions[sid] = Session(sid, d, t)
        return s

    def close(self, sid: str) -> None:
        s = self.sessions.pop(sid, None)
        if s is None:
            return
        self.draft_kv.unreserve(s.draft)
        self.target_kv.unreserve(s.target)
        if s.tree is not None:
            self.target_kv.unreserve(s.tree)
        if s.last_logits is not None:
            self.ring.recycle(s.last_logits)
            s.last_logits = None

    def propose(self, s: Session, tokens: List[int], k: int) -> List[int]:
        logits = self.ring.claim()  # clean: recycled in finally
        try:
            out = list(tokens)
            for _ in range(k):
                n = self.draft.forward(out, s.draft, logits)
                out.append(int(logits[n - 1].argmax()))
            return out[len(tokens):]
        finally:
            self.ring.recycle(logits)

    def propose_early(self, s: Session, tokens: List[int], k: int, threshold: float) -> List[int]:
        logits = self.ring.claim()  # leak: a low confidence proposal returns without the recycle
        out: List[int] = []
        for _ in range(k):
            n = self.draft.forward(tokens + out, s.draft, logits)
            prob, tok = torch.softmax(logits[n - 1], -1).max(-1)
            if prob.item() < threshold:
                return out
            out.append(int(tok))
        self.ring.recycle(logits)
        return out

    def _target_logits(self, s: Session, tokens: List[int]) -> torch.Tensor:
        buf = self.ring.claim()  # clean: returned to the caller
        self.target.forward(tokens, s.target, buf)
        return buf

    def verify(self, s: Session, tokens: List[int], proposal: List[int]) -> int:
        logits = self._target_logits(s, tokens + proposal)  # clean: recycled before the count is returned
        picks = logits[: len(proposal)].argmax(-1).tolist()
        accepted = 0
        for p, q in zip(proposal, picks):
            if p != q:
                break
            accepted += 1
        self.ring.recycle(logits)
        return accepted

    def bonus_token(self, s: Session, tokens: List[int]) -> int:
        row = self._target_logits(s, tokens)[len(tokens) - 1]  # leak: only a row of the ring buffer is kept
        return int(row.argmax())

    def remember(self, s: Session, tokens: List[int]) -> None:
        if s.last_logits is not None:
            self.ring.recycle(s.last_logits)
        s.last_logits = self._target_logits(s, tokens)  # clean: near miss, the one before is recycled, close() the last

    def sample_top(self, s: Session, tokens: List[int], n: int) -> torch.Tensor:
        logits = self._target_logits(s, tokens)  # clean: near miss, a different name goes back to the ring
        full = logits
        logits = logits[len(tokens) - 1].topk(n).indices.clone()
        self.ring.recycle(full)
        return logits

    # -- trees ---------------------------------------------------------------

    def grow_tree(self, s: Session, width: int, depth: int) -> bool:
        want = width * depth
        if s.tree is not None and s.tree.size >= want:
            return True
        region = self.target_kv.reserve(want)  # leak: a smaller tree region held before is overwritten
        if region is None:
            return False
        s.tree = region
        return True

    def rebuild_tree(self, s: Session, width: int, depth: int) -> bool:
        old, s.tree = s.tree, None
        if old is not None:
            self.target_kv.unreserve(old)
        s.tree = self.target_kv.reserve(width * depth)  # clean: kept by the session, the old tree went back first
        return s.tree is not None

    def prune_tree(self, s: Session, kept: int) -> None:
        if s.tree is None:
            return
        if kept == 0:
            self.target_kv.unreserve(s.tree)
            s.tree = None
        else:
            s.tree = self.target_kv.truncate(s.tree, kept)

    def calibrate(self, s: Session, samples: Dict[str, List[int]]) -> Dict[str, Any]:
        report: Dict[str, Any] = {}
        for name, toks in samples.items():
            buf = self.ring.claim()  # leak: a sample with an out-of-range token is recorded and skipped
            if max(toks) >= self.target.vocab_limit():
                report[name] = None
                continue
            n = self.target.forward(toks, s.target, buf)
            report[name] = buf[:n].std().item()
            self.ring.recycle(buf)
        return report
