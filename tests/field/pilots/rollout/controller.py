from __future__ import annotations

import logging
from collections import deque
from typing import Callable, Optional

from .resources import Replica, ReplicaLeases, WeightVersions
from .worker import Episode, EpisodeRunner

logger = logging.getLogger(__name__)


class RolloutController:
    def __init__(self, runner: EpisodeRunner, leases: ReplicaLeases, versions: WeightVersions, score: Callable[[Episode], float]):
        self.runner = runner
        self.leases = leases
        self.versions = versions
        self.score = score
        self.queue: deque[Episode] = deque()
        self.live: list[Episode] = []

    def collect(self, max_turns: int) -> list[Episode]:
        while self.queue and self.runner.begin(self.queue[0]):
            self.live.append(self.queue.popleft())
        done: list[Episode] = []
        for ep in list(self.live):
            for _ in range(max_turns):
                if not self.runner.turn(ep):
                    break
            else:
                self.runner.discard(ep)
                self.live.remove(ep)
                continue
            self.runner.finish(ep, self.score(ep))
            self.live.remove(ep)
            done.append(ep)
        return done

    def greedy_eval(self, prompts: list[str]) -> Optional[float]:
        version = self.versions.hold()  # clean: near miss, let go in the finally, the busy return included
        hits = 0
        try:
            for prompt in prompts:
                replica = self.leases.engage()  # clean: disengaged in the same turn
                if replica is None:
                    return None
                text = self.runner.generate(replica.rank, version, prompt)
                hits += text.endswith("</s>")
                self.leases.disengage(replica)
            return hits / max(len(prompts), 1)
        finally:
            self.versions.let_go(version)

    def best_of(self, prompt: str, n: int) -> str:
        version = self.versions.hold()  # clean: near miss, the one return comes after let_go whether or not a replica was had
        best = ""
        for _ in range(n):
            replica = self.leases.engage()  # leak: an empty answer continues without disengaging
            if replica is None:
                break
            text = self.runner.generate(replica.rank, version, prompt)
            if not text:
                continue
            best = max(best, text, key=len)
            self.leases.disengage(replica)
        self.versions.let_go(version)
        return best

    def gang(self, size: int) -> list[Replica]:
        team: list[Replica] = []
        while len(team) < size:
            replica = self.leases.engage()  # clean: near miss, an incomplete team is disengaged, a complete one goes to the caller
            if replica is None:
                for r in team:
                    self.leases.disengage(r)
                return []
            team.append(replica)
        return team

    def broadcast(self, prompt: str, size: int) -> list[str]:
        team = self.gang(size)  # leak: only the members with an answer are disengaged
        version = self.versions.hold()  # clean: let go after the loop
        texts: list[str] = []
        for replica in team:
            text = self.runner.generate(replica.rank, version, prompt)
            if text:
                texts.append(text)
                self.leases.disengage(replica)
        self.versions.let_go(version)
        return texts

    def shutdown(self) -> None:
        for ep in self.live:
            self.runner.finish(ep, 0.0)
        self.live.clear()
        self.queue.clear()
