"""Seeds and Philox offsets: each dropout call borrows a disjoint counter lane."""
import torch


class PhiloxLanes:
    def __init__(self, lanes, seed):
        self.offsets = torch.zeros(lanes, dtype=torch.int64)
        self.owner = torch.full((lanes,), -1, dtype=torch.int32)
        self.seed = seed

    def attach(self, who):
        mine = (self.owner == -1).nonzero(as_tuple=True)[0]
        if len(mine) == 0:
            return None
        lane = mine[self.offsets[mine].argmin()].item()
        self.owner[lane] = who
        return lane

    def detach(self, lane, consumed=4):
        self.offsets[lane] += consumed
        self.owner[lane] = -1


class Dropout:
    def __init__(self, rank, lanes: PhiloxLanes, kernel):
        self.rank = rank
        self.lanes = lanes
        self.kernel = kernel

    def forward(self, x, p):
        lane = self.lanes.attach(self.rank)  # leak: p == 0 returns while attached
        if lane is None:
            return x
        if p == 0.0:
            return x
        y = self.kernel.dropout(x, p, lane)
        self.lanes.detach(lane, x.numel())
        return y

    def safe_forward(self, x, p):
        lane = self.lanes.attach(self.rank)  # clean: detached in finally
        if lane is None:
            return x
        try:
            return self.kernel.dropout(x, p, lane)
        finally:
            self.lanes.detach(lane, x.numel())

    def begin_replay(self):
        self.lane = self.lanes.attach(self.rank)  # clean: end_replay() detaches
        return self.lane is not None

    def end_replay(self):
        self.lanes.detach(self.lane)

    def sample(self, xs):
        out = []
        for x in xs:
            lane = self.lanes.attach(self.rank)  # leak: continue on an empty tensor
            if lane is None:
                break
            if x.numel() == 0:
                continue
            out.append(self.kernel.uniform(x, lane))
            self.lanes.detach(lane, x.numel())
        return out
