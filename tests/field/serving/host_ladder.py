"""Size-class ladder of host buffers: a request is served from the smallest class that fits."""
import bisect
import dataclasses
import logging
import typing as t

import torch

LOG = logging.getLogger(__name__)


@dataclasses.dataclass
class LadderConfig:
    classes: t.Sequence[int] = (1 << 10, 1 << 14, 1 << 18)
    per_class: int = 4
    zero_on_return: bool = False


class Ladder:
    def __init__(self, cfg: LadderConfig):
        self.cfg = cfg
        self._sizes = list(cfg.classes)
        self._bins: t.Dict[int, t.List[torch.Tensor]] = {
            s: [torch.empty(s, dtype=torch.uint8) for _ in range(cfg.per_class)] for s in self._sizes
        }

    def rent(self, nbytes: int) -> t.Optional[torch.Tensor]:
        i = bisect.bisect_left(self._sizes, nbytes)
        for size in self._sizes[i:]:
            if self._bins[size]:
                return self._bins[size].pop()
        return None

    def rent_clean(self, nbytes: int) -> t.Optional[torch.Tensor]:
        i = bisect.bisect_left(self._sizes, nbytes)
        for size in self._sizes[i:]:
            stack = self._bins[size]
            while stack:
                buf = stack.pop()  # leak: a dirty buffer is passed over and not kept anywhere
                if not bool(buf[:64].any()):
                    return buf
        return None

    def rent_exact(self, nbytes: int) -> t.Optional[torch.Tensor]:
        stack = self._bins.get(nbytes)
        if not stack:
            return None
        buf = stack.pop()  # clean: near miss, pushed back when dirty
        if bool(buf[:64].any()):
            stack.insert(0, buf)
            return None
        return buf

    def unrent(self, buf: torch.Tensor) -> None:
        if self.cfg.zero_on_return:
            buf.zero_()
        self._bins[buf.numel()].append(buf)

    def rebalance(self, src: int, dst: int) -> int:
        moved = 0
        while self._bins[src] and moved < self.cfg.per_class:
            big = self._bins[src].pop()  # clean: both halves or the buffer itself are stored again
            if big.numel() != 2 * dst:
                self._bins[src].append(big)
                break
            self._bins[dst].extend([big[:dst], big[dst:]])
            moved += 1
        return moved


class Serializer:
    def __init__(self, ladder: Ladder):
        self.ladder = ladder
        self.pending: t.List[t.Tuple[torch.Tensor, int]] = []

    def pack(self, tensors: t.Sequence[torch.Tensor]) -> t.Optional[bytes]:
        total = sum(x.numel() * x.element_size() for x in tensors)
        buf = self.ladder.rent(total)  # clean: the bytes are copied out and the buffer is unrented
        if buf is None:
            return None
        off = 0
        for x in tensors:
            raw = x.contiguous().view(torch.uint8).flatten()
            buf[off : off + raw.numel()] = raw
            off += raw.numel()
        data = buf[:off].numpy().tobytes()
        self.ladder.unrent(buf)
        return data

    def pack_trimmed(self, x: torch.Tensor) -> t.Optional[torch.Tensor]:
        buf = self.ladder.rent(x.numel())  # leak: rebound to a contiguous copy of its head, the rented one is gone
        if buf is None:
            return None
        buf[: x.numel()].copy_(x.flatten())
        buf = buf[: x.numel()].clone()
        return buf

    def queue(self, x: torch.Tensor) -> bool:
        buf = self.ladder.rent(x.numel())  # clean: waits in the pending list until drain
        if buf is None:
            return False
        buf[: x.numel()].copy_(x.flatten())
        self.pending.append((buf, x.numel()))
        return True

    def drain(self, write: t.Callable[[bytes], int]) -> int:
        n = 0
        for buf, size in self.pending:
            n += write(buf[:size].numpy().tobytes())
            self.ladder.unrent(buf)
        self.pending = []
        return n

    def spool(self, xs: t.Iterable[torch.Tensor], path: str) -> int:
        n = 0
        with open(path, "wb") as f:  # clean: with statement
            for x in xs:
                buf = self.ladder.rent(x.numel())  # leak: an empty tensor is skipped with its buffer rented
                if buf is None:
                    break
                if not x.numel():
                    continue
                buf[: x.numel()].copy_(x.flatten())
                f.write(buf[: x.numel()].numpy().tobytes())
                self.ladder.unrent(buf)
                n += 1
        return n

    def compare(self, a: torch.Tensor, b: torch.Tensor) -> t.Optional[bool]:
        ba = self.ladder.rent(a.numel())  # leak: when b has no buffer a's is forgotten
        bb = self.ladder.rent(b.numel())  # leak: when a has no buffer b's is forgotten
        if ba is None or bb is None:
            return None
        ba[: a.numel()].copy_(a.flatten())
        bb[: b.numel()].copy_(b.flatten())
        same = bool(torch.equal(ba[: a.numel()], bb[: b.numel()]))
        self.ladder.unrent(ba)
        self.ladder.unrent(bb)
        return same

    def compare2(self, a: torch.Tensor, b: torch.Tensor) -> t.Optional[bool]:
        ba = self.ladder.rent(a.numel())  # clean: near miss, each is unrented if it was got
        bb = self.ladder.rent(b.numel())  # clean: near miss, each is unrented if it was got
        same = None
        if ba is not None and bb is not None:
            ba[: a.numel()].copy_(a.flatten())
            bb[: b.numel()].copy_(b.flatten())
            same = bool(torch.equal(ba[: a.numel()], bb[: b.numel()]))
        if ba is not None:
            self.ladder.unrent(ba)
        if bb is not None:
            self.ladder.unrent(bb)
        return same

    def fingerprint(self, x: torch.Tensor) -> int:
        buf = self.ladder.rent_exact(x.numel())  # clean: unrented after the sum
        if buf is None:
            buf = self.ladder.rent(x.numel())  # clean: the second choice, unrented after the sum
        if buf is None:
            return 0
        buf[: x.numel()].copy_(x.flatten())
        h = int(buf[: x.numel()].sum())
        self.ladder.unrent(buf)
        return h
