from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Optional

from .resources import Replica, ReplicaLeases, WeightVersions


@dataclass
class Episode:
    prompt: str
    replica: Optional[Replica] = None
    version: Optional[int] = None
    turns: list[str] = field(default_factory=list)
    reward: Optional[float] = None


class EpisodeRunner:
    def __init__(self, leases: ReplicaLeases, versions: WeightVersions, generate: Callable[[int, int, str], str]):
        self.leases = leases
        self.versions = versions
        self.generate = generate

    def begin(self, ep: Episode) -> bool:
        ep.replica = self.leases.engage()  # clean: near miss, finish() and discard() both disengage what an episode holds
        if ep.replica is None:
            return False
        ep.version = self.versions.hold()  # leak: discard() disengages the replica and leaves the version held
        return True

    def turn(self, ep: Episode) -> bool:
        assert ep.replica is not None and ep.version is not None
        text = self.generate(ep.replica.rank, ep.version, ep.prompt + "".join(ep.turns))
        ep.turns.append(text)
        return not text.endswith("</s>")

    def migrate(self, ep: Episode) -> bool:
        other = self.leases.engage()  # clean: near miss, swapped with the present replica, which is disengaged
        if other is None:
            return False
        if ep.replica is not None:
            self.leases.disengage(ep.replica)
        ep.replica = other
        return True

    def refresh(self, ep: Episode) -> None:
        if ep.version != self.versions.current:
            ep.version = self.versions.hold()  # leak: the older version of the episode is overwritten without let_go

    def finish(self, ep: Episode, reward: float) -> None:
        ep.reward = reward
        self.leases.disengage(ep.replica)
        self.versions.let_go(ep.version)
        ep.replica = ep.version = None

    def discard(self, ep: Episode) -> None:
        if ep.replica is not None:
            self.leases.disengage(ep.replica)
            ep.replica = None
        ep.version = None
