# State slots for SSM layers. One slot = conv state + ssm state of a sequence.
from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple
import torch


class StateSlots:
    def __init__(self, n, conv, ssm):
        self.conv = torch.zeros((n,) + conv)
        self.ssm = torch.zeros((n,) + ssm)
        self.mask = torch.ones(n, dtype=torch.bool)

    def grab(self):
        free = torch.nonzero(self.mask)
        if free.numel() == 0:
            return None
        i = int(free[0])
        self.mask[i] = False
        return i

    def drop(self, i):
        self.conv[i].zero_()
        self.ssm[i].zero_()
        self.mask[i] = True


@dataclass
class StateRef:
    slot: int
    length: int = 0


class StateTable:
    def __init__(self, slots, max_len=4096):
        self.slots = slots
        self.max_len = max_len
        self.refs: Dict[str, StateRef] = {}
        self.snap: Optional[int] = None

    def start(self, rid):
        ref = self.refs.get(rid)
        if ref is None:
            i = self.slots.grab()  # clean: goes into refs, stop drops it
            if i is None:
                return None
            ref = self.refs[rid] = StateRef(i)
        return ref

    def start_batch(self, rids):
        got = []
        for rid in rids:
            i = self.slots.grab()  # leak: when the slots run out, those of the earlier ids in got are lost
            if i is None:
                return False
            got.append((rid, i))
        for rid, i in got:
            self.refs[rid] = StateRef(i)
        return True

    def start_batch_all(self, rids):
        got = []
        for rid in dict.fromkeys(r for r in rids if r not in self.refs):
            i = self.slots.grab()  # clean: near miss, the for-else keeps, the break path drops all of got
            if i is None:
                break
            got.append((rid, i))
        else:
            self.refs.update((rid, StateRef(i)) for rid, i in got)
            return True
        for _, i in got:
            self.slots.drop(i)
        return False

    def stop(self, rid):
        ref = self.refs.pop(rid, None)
        if ref is not None:
            self.slots.drop(ref.slot)

    def stop_all(self):
        for rid in list(self.refs):
            self.stop(rid)

    def fork(self, src, dst):
        i = self.slots.grab()  # leak: an unknown source id returns with the slot
        if i is None:
            return None
        ref = self.refs.get(src)
        if ref is None:
            return None
        self.slots.conv[i] = self.slots.conv[ref.slot]
        self.slots.ssm[i] = self.slots.ssm[ref.slot]
        self.refs[dst] = StateRef(i, ref.length)
        return self.refs[dst]

    def checkpoint(self, rid):
        if self.snap is None:
            self.snap = self.slots.grab()  # clean: near miss, taken once, restore and discard both drop it
        if self.snap is None:
            return False
        ref = self.refs[rid]
        self.slots.ssm[self.snap] = self.slots.ssm[ref.slot]
        return True

    def discard(self):
        if self.snap is not None:
            self.slots.drop(self.snap)
            self.snap = None

    def restore(self, rid):
        if self.snap is None:
            return
        self.slots.ssm[self.refs[rid].slot] = self.slots.ssm[self.snap]
        self.discard()

    def replace(self, rid):
        i = self.slots.grab()  # clean: near miss, the former slot is dropped before ref.slot is written
        if i is None:
            return
        ref = self.refs[rid]
        self.slots.ssm[i] = self.slots.ssm[ref.slot]
        self.slots.drop(ref.slot)
        ref.slot = i

    def scan(self, xs: torch.Tensor) -> Optional[torch.Tensor]:
        i = self.slots.grab()  # clean: one exit, dropped
        if i is None:
            return None
        ys = []
        for x in xs:
            self.slots.ssm[i].mul_(0.9).add_(x)
            ys.append(self.slots.ssm[i].clone())
        self.slots.drop(i)
        return torch.stack(ys)

    def scan_until(self, xs: torch.Tensor, limit: float) -> Tuple[int, List[torch.Tensor]]:
        i = self.slots.grab()  # leak: return inside the loop at the limit
        ys: List[torch.Tensor] = []
        if i is None:
            return 0, ys
        for t, x in enumerate(xs):
            self.slots.ssm[i].mul_(0.9).add_(x)
            if self.slots.ssm[i].abs().max() > limit:
                return t, ys
            ys.append(self.slots.ssm[i].clone())
        self.slots.drop(i)
        return len(ys), ys

    def scan_capped(self, xs: torch.Tensor, limit: float) -> List[torch.Tensor]:
        i = self.slots.grab()  # clean: near miss, break leads to the drop
        ys: List[torch.Tensor] = []
        if i is None:
            return ys
        for x in xs:
            self.slots.ssm[i].mul_(0.9).add_(x)
            if self.slots.ssm[i].abs().max() > limit:
                break
            ys.append(self.slots.ssm[i].clone())
        self.slots.drop(i)
        return ys
