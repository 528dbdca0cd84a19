"""Recurrent-state slots of chat sessions (one slot per conversation)."""
from __future__ import annotations

import collections
import dataclasses
import time


class SlotsFull(RuntimeError):
    pass


class StateSlots:
    def __init__(self, count):
        self._vacant = list(range(count))

    def claim(self):
        if not self._vacant:
            raise SlotsFull
        return self._vacant.pop()

    def vacate(self, slot):
        self._vacant.append(slot)


@dataclasses.dataclass(frozen=True)
class Session:
    sid: str
    slot: int
    last_used: float
    turns: int = 0


class SessionStore:
    def __init__(self, slots):
        self.slots = slots
        self.sessions = {}

    def on_message(self, sid, first):
        if first:
            self.sessions[sid] = Session(sid, self.slots.claim(), time.monotonic())  # leak: a conversation begun anew under its id overwrites the session (by meaning)
        session = self.sessions[sid]
        self.sessions[sid] = dataclasses.replace(session, turns=session.turns + 1)
        return session.slot

    def end(self, sid):
        session = self.sessions.pop(sid, None)
        if session is not None:
            self.slots.vacate(session.slot)


class ParkingStore:
    def __init__(self, slots):
        self.slots = slots
        self.active = {}
        self.parked = {}

    def open(self, sid):
        if sid in self.parked:
            self.active[sid] = self.parked.pop(sid)
        elif sid not in self.active:
            self.active[sid] = self.slots.claim()  # leak: abort looks into the active table only, a parked session keeps its slot
        return self.active[sid]

    def park(self, sid):
        self.parked[sid] = self.active.pop(sid)

    def abort(self, sid):
        slot = self.active.pop(sid, None)
        if slot is not None:
            self.slots.vacate(slot)


class TwoTierStore:
    def __init__(self, slots):
        self.slots = slots
        self.hot = {}
        self.cold = {}

    def open(self, sid):
        for tier in (self.hot, self.cold):
            if sid in tier:
                return tier[sid]
        slot = self.slots.claim()  # clean: near miss, both tiers are searched here and in close
        self.hot[sid] = slot
        return slot

    def demote(self, sid):
        if sid in self.hot:
            self.cold[sid] = self.hot.pop(sid)

    def close(self, sid):
        for tier in (self.hot, self.cold):
            slot = tier.pop(sid, None)
            if slot is not None:
                self.slots.vacate(slot)


class IdleReaper:
    def __init__(self, slots, idle_s):
        self.slots = slots
        self.idle_s = idle_s
        self.sessions = {}

    def touch(self, sid):
        known = self.sessions.get(sid)
        slot = known.slot if known else self.slots.claim()  # leak: reap deletes idle sessions without vacating the slot
        self.sessions[sid] = Session(sid, slot, time.monotonic())
        return slot

    def reap(self):
        limit = time.monotonic() - self.idle_s
        for sid in [s for s, sess in self.sessions.items() if sess.last_used < limit]:
            del self.sessions[sid]

    def close(self, sid):
        session = self.sessions.pop(sid, None)
        if session:
            self.slots.vacate(session.slot)


class SnapshotStack:
    """State snapshots of one session, for editing earlier turns."""

    def __init__(self, slots, copy_state):
        self.slots = slots
        self.copy_state = copy_state
        self.live = slots.claim()  # clean: near miss, rollback vacates the slot before the snapshot takes its place
        self.snapshots = []

    def snapshot(self):
        slot = self.slots.claim()  # leak: a rollback of several turns cuts off the later snapshots
        self.copy_state(self.live, slot)
        self.snapshots.append(slot)

    def rollback(self, turn):
        self.slots.vacate(self.live)
        self.live = self.snapshots[turn]
        del self.snapshots[turn:]

    def close(self):
        self.slots.vacate(self.live)
        for slot in self.snapshots:
            self.slots.vacate(slot)
        self.snapshots.clear()


class MovingSessions:
    def __init__(self, slots, copy_state):
        self.slots = slots
        self.copy_state = copy_state
        self.sessions = {}

    def open(self, sid):
        if sid not in self.sessions:
            self.sessions[sid] = Session(sid, self.slots.claim(), time.monotonic())  # clean: near miss, a move vacates the slot that it replaces
        return self.sessions[sid]

    def move(self, sid):
        session = self.sessions[sid]
        moved = dataclasses.replace(session, slot=self.slots.claim())  # clean: near miss, a further move or close vacates it
        self.copy_state(session.slot, moved.slot)
        self.sessions[sid] = moved
        self.slots.vacate(session.slot)

    def close(self, sid):
        if sid in self.sessions:
            self.slots.vacate(self.sessions.pop(sid).slot)


class TurnRunner:
    """Runs a turn on a copy of the state and commits it when the turn was good."""

    def __init__(self, slots, copy_state, model):
        self.slots = slots
        self.copy_state = copy_state
        self.model = model
        self.committed = {}

    def start(self, sid):
        if sid in self.committed:
            return
        self.committed[sid] = self.slots.claim()  # clean: near miss, a good turn swaps it out and vacates it, stop ends the last

    def turn(self, sid, tokens):
        trial = self.slots.claim()  # leak: a turn that the filter rejects returns without vacating the copy
        self.copy_state(self.committed[sid], trial)
        out = self.model(trial, tokens)
        if out.filtered:
            return None
        previous, self.committed[sid] = self.committed[sid], trial
        self.slots.vacate(previous)
        return out.text

    def stop(self, sid):
        slot = self.committed.pop(sid, None)
        if slot is not None:
            self.slots.vacate(slot)


class WaitList:
    """First come, first served; a waiting session gets the slot of the one that leaves."""

    def __init__(self, slots):
        self.slots = slots
        self.owner = {}
        self.waiting = collections.deque()

    def join(self, sid):
        if sid in self.owner or sid in self.waiting:
            return
        try:
            self.owner[sid] = self.slots.claim()  # clean: near miss, leave hands the slot to the next in line or vacates it
        except SlotsFull:
            self.waiting.append(sid)

    def leave(self, sid):
        if sid in self.waiting:
            self.waiting.remove(sid)
            return
        slot = self.owner.pop(sid, None)
        if slot is None:
            return
        if self.waiting:
            self.owner[self.waiting.popleft()] = slot
        else:
            self.slots.vacate(slot)
