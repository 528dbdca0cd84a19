"""All-to-all between sequence shards and head shards."""
import torch
import torch.distributed as dist

from .lanes import LaneGuard


class Exchange:
    def __init__(self, yard, group=None):
        self.yard = yard
        self.group = group
        self.world = dist.get_world_size(group)

    def _swap(self, x):
        lane = self.yard.enter()  # clean: near miss, the lane goes to the caller together with its view
        view = lane.shaped(x.shape)
        dist.all_to_all_single(view, x.contiguous(), group=self.group)
        return lane, view

    def seq_to_head(self, x):
        lane, view = self._swap(x)  # clean: left after the clone
        out = view.clone()
        self.yard.leave(lane)
        return out

    def head_to_seq(self, x, scale=None):
        lane, view = self._swap(x)  # leak: with a scale the product is returned and the lane never left
        if scale is not None:
            return view * scale
        out = view.clone()
        self.yard.leave(lane)
        return out

    def swap_detached(self, x):
        with LaneGuard(self.yard) as g:  # clean: near miss, the detached lane goes to the caller
            dist.all_to_all_single(g.lane.shaped(x.shape), x.contiguous(), group=self.group)
            return g.detach()

    def mean_or_local(self, x):
        with LaneGuard(self.yard) as g:  # leak: the detached lane is left only when the world is larger than one
            lane = g.detach()
        view = lane.shaped(x.shape)
        view.copy_(x)
        if self.world == 1:
            return view.clone()
        dist.all_reduce(view, group=self.group)
        out = view / self.world
        self.yard.leave(lane)
        return out

    def opportunistic(self, x):
        lane = self.yard.enter_now()  # clean: near miss, without a lane plain memory is used and nothing is owed
        dst = torch.empty_like(x) if lane is None else lane.shaped(x.shape)
        dist.all_to_all_single(dst, x.contiguous(), group=self.group)
        if lane is None:
            return dst
        out = dst.clone()
        self.yard.leave(lane)
        return out
