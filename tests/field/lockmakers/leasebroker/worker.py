from __future__ import annotations

import logging
from typing import Callable

import torch

from .broker import Broker, Lease, NoCapacity

log = logging.getLogger(__name__)


class Preempted(Exception):
    pass


class Worker:
    def __init__(self, broker: Broker, name: str):
        self.broker = broker
        self.name = name
        self.lease: Lease | None = None
        self.steps = 0

    def __enter__(self) -> Worker:
        self.lease = self.broker.obtain(self.name)  # clean: kept as self.lease, which __exit__ relinquishes
        return self

    def __exit__(self, *exc) -> bool:
        lease, self.lease = self.lease, None
        if lease is not None:
            self.broker.relinquish(lease)
        return False

    def train(self, step: Callable[[int, str], torch.Tensor], limit: int) -> list[float]:
        losses = []
        for n in range(limit):
            losses.append(float(step(n, self.lease.host)))
            self.broker.renew(self.lease)
            self.steps += 1
        return losses

    def evaluate(self, fn: Callable[[str], torch.Tensor]) -> float | None:
        lease = self.broker.obtain(self.name)  # leak: Preempted is logged and None returned without relinquish
        try:
            score = float(fn(lease.host))
        except Preempted:
            log.info("%s: evaluation preempted on %s", self.name, lease.host)
            return None
        self.broker.relinquish(lease)
        return score

    def evaluate_near(self, fn: Callable[[str], torch.Tensor], hosts: list[str]) -> float | None:
        try:
            lease = self.broker.obtain_near(self.name, hosts)  # clean: relinquished in finally
        except NoCapacity:
            return None
        try:
            return float(fn(lease.host))
        except Preempted:
            return None
        finally:
            self.broker.relinquish(lease)

    def allreduce_check(self, fn: Callable[[list[str]], bool], n: int) -> bool:
        group = self.broker.obtain_group(self.name, n)  # leak: of a failed check only the first lease is relinquished
        if not fn([g.host for g in group]):
            self.broker.relinquish(group[0])
            return False
        for g in group:
            self.broker.relinquish(g)
        return True

    def retry_on(self, fn: Callable[[str], torch.Tensor], host: str, tries: int = 3) -> torch.Tensor | None:
        for _ in range(tries):
            lease = self.broker.obtain_on(self.name, host)  # leak: a preempted try goes round the loop with its lease out
            if lease is None:
                continue
            try:
                out = fn(lease.host)
            except Preempted:
                continue
            self.broker.relinquish(lease)
            return out
        return None
