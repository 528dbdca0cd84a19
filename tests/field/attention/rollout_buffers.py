"""Experience buffers for RL fine-tuning of a policy model."""
from __future__ import annotations

import dataclasses
import json
import logging
import pathlib
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, TextIO

import torch
import torch.nn.functional as F

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class RolloutCfg:
    horizon: int = 128
    buffers: int = 4
    gamma: float = 0.99
    log_dir: str = "runs"


class Experience:
    def __init__(self, horizon: int) -> None:
        self.tokens = torch.zeros(horizon, dtype=torch.long)
        self.logp = torch.zeros(horizon)
        self.reward = torch.zeros(horizon)
        self.n = 0


class ExperiencePool:
    def __init__(self, cfg: RolloutCfg) -> None:
        self._shelf = [Experience(cfg.horizon) for _ in range(cfg.buffers)]

    def grab(self) -> Optional[Experience]:
        if not self._shelf:
            return None
        e = self._shelf.pop()
        e.n = 0
        return e

    def drop(self, e: Experience) -> None:
        self._shelf.append(e)


class RolloutWriter:
    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.fh: Optional[TextIO] = None
        self.rows = 0

    def write(self, row: Dict[str, Any]) -> None:
        if self.fh is None:
            self.fh = open(self.path, "a")  # clean: near miss, opened only when empty, close closes it
        self.fh.write(json.dumps(row) + "\n")
        self.rows += 1

    def rotate(self, suffix: str) -> None:
        self.close()
        self.path = self.path.with_suffix(suffix)

    def close(self) -> None:
        if self.fh is not None:
            self.fh.close()
            self.fh = None


class RotatingWriter:
    def __init__(self, path: pathlib.Path, every: int) -> None:
        self.path = path
        self.every = every
        self.rows = 0
        self.fh = open(path, "a")  # leak: the rotation overwrites the field without closing

    def write(self, row: Dict[str, Any]) -> None:
        self.fh.write(json.dumps(row) + "\n")
        self.rows += 1
        if self.rows % self.every == 0:
            self.fh = open(self.path.with_suffix(f".{self.rows}"), "a")  # leak: the next rotation overwrites it without closing

    def close(self) -> None:
        self.fh.close()


class Trainer:
    def __init__(self, cfg: RolloutCfg, pool: ExperiencePool, policy: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.cfg = cfg
        self.pool = pool
        self.policy = policy
        self.ready: List[Experience] = []

    def collect(self, prompt: torch.Tensor, reward: Callable[[torch.Tensor], float]) -> bool:
        e = self.pool.grab()  # clean: near miss, an empty rollout is dropped, others go to ready
        if e is None:
            return False
        self._fill(e, prompt)
        if e.n == 0:
            self.pool.drop(e)
            return False
        e.reward[e.n - 1] = reward(e.tokens[: e.n])
        self.ready.append(e)
        return True

    def collect_filtered(self, prompt: torch.Tensor, reward: Callable[[torch.Tensor], float], floor: float) -> bool:
        e = self.pool.grab()  # leak: a rollout with a reward under the floor is thrown away with its buffer
        if e is None:
            return False
        self._fill(e, prompt)
        r = reward(e.tokens[: e.n])
        if r < floor:
            logger.debug("rollout rejected (%.3f)", r)
            return False
        e.reward[e.n - 1] = r
        self.ready.append(e)
        return True

    def _fill(self, e: Experience, prompt: torch.Tensor) -> None:
        for i in range(min(self.cfg.horizon, prompt.numel())):
            logits = self.policy(prompt[: i + 1])
            tok = int(logits.argmax())
            e.tokens[i] = tok
            e.logp[i] = F.log_softmax(logits, -1)[tok]
            e.n = i + 1
            if tok == 0:
                break

    def update(self, step: Callable[[Experience], float]) -> float:
        total = 0.0
        while self.ready:
            e = self.ready.pop()
            total += step(e)
            self.pool.drop(e)
        return total

    def evaluate(self, prompts: Iterable[torch.Tensor]) -> Iterator[float]:
        e = self.pool.grab()  # clean: one buffer for all prompts, dropped after the loop
        if e is None:
            return
        for p in prompts:
            e.n = 0
            self._fill(e, p)
            yield float(e.logp[: e.n].sum())
        self.pool.drop(e)

    def returns(self, prompt: torch.Tensor) -> torch.Tensor:
        e = self.pool.grab()  # leak: the None check is there and the drop is missing
        if e is None:
            return torch.zeros(0)
        self._fill(e, prompt)
        disc = self.cfg.gamma ** torch.arange(e.n)
        return (e.reward[: e.n] * disc).cumsum(0)

    def compare(self, a: torch.Tensor, b: torch.Tensor) -> Optional[float]:
        ea = self.pool.grab()  # leak: not dropped when the second buffer is missing
        if ea is None:
            return None
        eb = self.pool.grab()  # clean: None ends early, else dropped
        if eb is None:
            return None
        self._fill(ea, a)
        self._fill(eb, b)
        d = float(ea.logp.sum() - eb.logp.sum())
        self.pool.drop(ea)
        self.pool.drop(eb)
        return d


def dump(cfg: RolloutCfg, rows: List[Dict[str, Any]], pretty: bool) -> int:
    path = pathlib.Path(cfg.log_dir) / "rollouts.json"
    out = open(path, "w")  # clean: near miss, both branches close
    if pretty:
        json.dump(rows, out, indent=1)
        out.close()
    else:
        for r in rows:
            out.write(json.dumps(r))
        out.close()
    return len(rows)


def load(path: str, limit: int) -> List[Dict[str, Any]]:
    src = open(path)  # leak: reaching the limit returns with the file open
    rows: List[Dict[str, Any]] = []
    for line in src:
        if len(rows) >= limit:
            return rows
        rows.append(json.loads(line))
    src.close()
    return rows
