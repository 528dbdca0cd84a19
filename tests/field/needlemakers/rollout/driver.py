from __future__ import annotations

import logging

from .buffers import Recorder
from .leases import DeviceBoard, Post, WorkerSlots

log = logging.getLogger(__name__)


class EnvCrashed(Exception):
    pass


class Driver:
    def __init__(self, slots: WorkerSlots, devices: DeviceBoard, recorder: Recorder):
        self.slots = slots
        self.devices = devices
        self.recorder = recorder
        self.posts: dict[str, Post] = {}

    def hire(self, name: str) -> bool:
        if name in self.posts:
            return True
        post = Post(self.slots, self.devices)
        if not post.fill():  # clean: near miss, kept in self.posts, vacated by fire
            return False
        self.posts[name] = post
        return True

    def fire(self, name: str) -> None:
        post = self.posts.pop(name, None)
        if post is not None:
            post.vacate()

    def episode(self, env, policy) -> bool:
        slot = self.slots.enlist()  # leak: a crash of the environment is handled without dismissing the slot
        if slot is None:
            return False
        try:
            env.play(slot, policy)
        except EnvCrashed:
            log.warning("environment crashed on %s", slot.host)
            return False
        self.slots.dismiss(slot)
        return True

    def evaluate(self, env, policy, n: int) -> float | None:
        total = 0.0
        with self.devices.engaged() as dev:  # clean: with block
            if dev is None:
                return None
            for _ in range(n):
                slot = self.slots.enlist()  # clean: dismissed by the finally
                if slot is None:
                    break
                try:
                    total += env.play(slot, policy.to(dev))
                except EnvCrashed:
                    continue
                finally:
                    self.slots.dismiss(slot)
        return total / n

    def duel(self, env, left, right, host: str):
        a = self.slots.enlist_on(host)  # leak: no second slot on the host leaves the first enlisted
        if a is None:
            return None
        b = self.slots.enlist_on(host)  # clean: dismissed by the finally
        if b is None:
            return None
        try:
            return env.duel(a, b, left, right)
        finally:
            self.slots.dismiss(a)
            self.slots.dismiss(b)

    def rebalance(self, names: list[str]) -> int:
        moved = 0
        hot = self.devices.busiest()
        for name in names:
            post = self.posts[name]
            if post.device not in hot:
                continue
            new = self.devices.engage()  # leak: a device that is as busy as the old one is skipped and stays engaged
            if new is None:
                break
            if new in hot:
                continue
            self.devices.disengage(post.device)
            post.device = new
            moved += 1
        return moved

    def shutdown(self) -> None:
        for name in list(self.posts):
            self.fire(name)
