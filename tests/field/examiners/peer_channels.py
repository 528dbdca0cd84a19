"""Channels to remote KV peers: checkout, retries and multi-peer transfers."""
from __future__ import annotations

import random
import time
from typing import Dict, List, Optional


class Channel:
    def __init__(self, peer: str):
        self.peer = peer
        self.healthy = True
        self.sent = 0

    def send(self, payload: bytes) -> bool:
        self.sent += len(payload)
        return self.healthy

    def ping(self) -> bool:
        self.healthy = random.random() > 0.1
        return self.healthy


class ChannelBank:
    """Per-peer stacks of reusable channels."""

    def __init__(self, peers: List[str], per_peer: int):
        self._stacks: Dict[str, List[Channel]] = {
            p: [Channel(p) for _ in range(per_peer)] for p in peers
        }

    def lease(self, peer: str) -> Optional[Channel]:
        stack = self._stacks.get(peer)
        if not stack:
            return None
        return stack.pop()  # clean: handed to the caller

    def lease_healthy(self, peer: str) -> Optional[Channel]:
        stack = self._stacks.get(peer, [])
        for _ in range(len(stack)):
            ch = stack.pop()  # clean: near miss, an unhealthy channel is put at the other end of the stack
            if ch.ping():
                return ch
            stack.insert(0, ch)
        return None

    def lease_any(self) -> Optional[Channel]:
        for stack in self._stacks.values():
            while stack:
                ch = stack.pop()  # leak: an unhealthy channel is skipped and belongs to no stack any more
                if ch.ping():
                    return ch
        return None

    def restore(self, ch: Channel) -> None:
        self._stacks[ch.peer].append(ch)


class Sender:
    def __init__(self, bank: ChannelBank, attempts: int = 3):
        self.bank = bank
        self.attempts = attempts

    def send_once(self, peer: str, payload: bytes) -> bool:
        ch = self.bank.lease(peer)  # clean: restored before the result is given
        if ch is None:
            return False
        ok = ch.send(payload)
        self.bank.restore(ch)
        return ok

    def send_retrying(self, peer: str, payload: bytes) -> bool:
        for attempt in range(self.attempts):
            ch = self.bank.lease_healthy(peer)  # leak: a failed send goes to the next attempt without restore
            if ch is None:
                time.sleep(0.01 * attempt)
                continue
            if ch.send(payload):
                self.bank.restore(ch)
                return True
        return False

    def send_patient(self, peer: str, payload: bytes) -> bool:
        for attempt in range(self.attempts):
            ch = self.bank.lease_healthy(peer)  # clean: near miss, finally runs on the return and on the next round
            if ch is None:
                time.sleep(0.01 * attempt)
                continue
            try:
                if ch.send(payload):
                    return True
            finally:
                self.bank.restore(ch)
        return False

    def send_tolerant(self, peer: str, payload: bytes) -> bool:
        ch = self.bank.lease(peer)  # leak: the handler for OSError returns without restore
        if ch is None:
            return False
        try:
            ok = ch.send(payload)
        except OSError:
            return False
        self.bank.restore(ch)
        return ok

    def wait_for(self, peer: str, deadline: float) -> Optional[Channel]:
        """A channel for the caller, or None at the deadline."""
        ch = self.bank.lease(peer)  # clean: near miss, leased again only while it is None
        while ch is None and time.monotonic() < deadline:
            time.sleep(0.005)
            ch = self.bank.lease(peer)  # clean: near miss, the loop stops at the first channel, which is returned
        return ch

    def send_by(self, peer: str, payload: bytes, deadline: float) -> bool:
        ch = self.wait_for(peer, deadline)  # leak: past the deadline a channel that was got is dropped
        if ch is None or time.monotonic() >= deadline:
            return False
        ok = ch.send(payload)
        self.bank.restore(ch)
        return ok


class Broadcast:
    """Channels to several peers which are held together."""

    def __init__(self, bank: ChannelBank):
        self.bank = bank
        self.group: List[Channel] = []

    def open_group(self, peers: List[str]) -> bool:
        for peer in peers:
            ch = self.bank.lease(peer)  # clean: near miss, kept in group, close_group runs on failure
            if ch is None:
                self.close_group()
                return False
            self.group.append(ch)
        return True

    def close_group(self) -> None:
        while self.group:
            self.bank.restore(self.group.pop())

    def relay(self, src: str, dst: str, payload: bytes) -> bool:
        up = self.bank.lease(src)  # leak: no restore when the second lease fails
        if up is None:
            return False
        down = self.bank.lease(dst)  # clean: restored together with the first
        if down is None:
            return False
        ok = up.send(payload) and down.send(payload)
        self.bank.restore(down)
        self.bank.restore(up)
        return ok

    def gather(self, peers: List[str]) -> int:
        chans = []
        for peer in peers:
            ch = self.bank.lease(peer)  # leak: the shortfall return drops the channels already in the local list
            if ch is None:
                return 0
            chans.append(ch)
        alive = sum(1 for ch in chans if ch.ping())
        for ch in chans:
            self.bank.restore(ch)
        return alive
