import dataclasses as dc
import typing as tp

import torch


@dc.dataclass
class GraphConfig:
    batch_sizes: tp.Tuple[int, ...] = (1, 2, 4, 8)
    hidden: int = 64
    use_pool: bool = True


class StaticInputPool:
    """Input buffers of captured graphs, one stack per padded batch size."""

    def __init__(self, cfg: GraphConfig):
        self.cfg = cfg
        self.stacks: tp.Dict[int, tp.List[torch.Tensor]] = {b: [] for b in cfg.batch_sizes}
        self.out = 0

    def take(self, bs: int) -> torch.Tensor:
        self.out += 1
        stack = self.stacks[bs]
        return stack.pop() if stack else torch.zeros(bs, self.cfg.hidden)

    def return_(self, t: torch.Tensor):
        self.out -= 1
        self.stacks[t.shape[0]].append(t)


class GraphRunner:
    def __init__(self, cfg: GraphConfig, model: torch.nn.Module):
        self.cfg = cfg
        self.model = model
        self.pool = StaticInputPool(cfg) if cfg.use_pool else None
        self.persistent: tp.Dict[int, torch.Tensor] = {}
        self.recaptured: tp.Dict[int, torch.Tensor] = {}

    def _pad(self, n: int) -> int:
        for b in self.cfg.batch_sizes:
            if b >= n:
                return b
        return -1

    def run(self, x: torch.Tensor) -> torch.Tensor:
        bs = self._pad(x.shape[0])
        if bs < 0:
            return self.model(x)
        if self.pool is not None:
            buf = self.pool.take(bs)  # clean: near miss, both guards test the same field
        else:
            buf = torch.zeros(bs, self.cfg.hidden)
        buf[: x.shape[0]].copy_(x)
        y = self.model(buf)[: x.shape[0]]
        if self.pool is not None:
            self.pool.return_(buf)
        return y

    def run_eager_tail(self, x: torch.Tensor, eager: bool) -> torch.Tensor:
        bs = self._pad(x.shape[0])
        buf = self.pool.take(bs)  # leak: the eager mode leaves before the return
        buf[: x.shape[0]].copy_(x)
        if eager:
            return self.model(x)
        y = self.model(buf)[: x.shape[0]]
        self.pool.return_(buf)
        return y

    def run_slice(self, x: torch.Tensor) -> torch.Tensor:
        buf = self.pool.take(self._pad(x.shape[0]))  # clean: near miss, the view has its own name and buf is returned whole
        view = buf[: x.shape[0]]
        view.copy_(x)
        y = self.model(view)
        self.pool.return_(buf)
        return y

    def run_relu(self, x: torch.Tensor) -> torch.Tensor:
        buf = self.pool.take(x.shape[0])  # leak: relu gives a new tensor, which is returned in place of the pool's
        buf.copy_(x)
        buf = torch.relu(buf)
        y = self.model(buf)
        self.pool.return_(buf)
        return y

    def run_relu_(self, x: torch.Tensor) -> torch.Tensor:
        buf = self.pool.take(x.shape[0])  # clean: near miss, relu_ works in place
        buf.copy_(x)
        buf = torch.relu_(buf)
        y = self.model(buf)
        self.pool.return_(buf)
        return y

    def capture(self) -> int:
        if self.pool is None:
            return 0
        for bs in self.cfg.batch_sizes:
            if bs in self.persistent:
                continue
            self.persistent[bs] = self.pool.take(bs)  # clean: kept per size, drop_graphs returns them all
        return len(self.persistent)

    def recapture(self, bs: int) -> torch.Tensor:
        buf = self.pool.take(bs)  # leak: replaces the buffer recaptured for this size before, which is not returned
        self.recaptured[bs] = buf
        return self.model(buf)

    def drop_graphs(self):
        for t in self.persistent.values():
            self.pool.return_(t)
        self.persistent.clear()
        for t in self.recaptured.values():
            self.pool.return_(t)
        self.recaptured.clear()

    def replay(self, x: torch.Tensor) -> tp.Optional[torch.Tensor]:
        bs = self._pad(x.shape[0])
        buf = self.persistent.get(bs)
        if buf is None:
            return None
        buf[: x.shape[0]].copy_(x)
        return self.model(buf)[: x.shape[0]]

    def bench(self, iters: int) -> tp.List[float]:
        bufs = [self.pool.take(b) for b in self.cfg.batch_sizes]  # clean: each is returned in the second loop
        means = []
        for _ in range(iters):
            for b in bufs:
                means.append(float(self.model(b).mean()))
        for b in bufs:
            self.pool.return_(b)
        return means

    def warm(self, only: tp.Optional[int] = None) -> int:
        n = 0
        for bs in self.cfg.batch_sizes:
            buf = self.pool.take(bs)  # leak: when only is given the loop ends with the buffer taken
            self.model(buf)
            n += 1
            if only is not None and bs >= only:
                break
            self.pool.return_(buf)
        return n
