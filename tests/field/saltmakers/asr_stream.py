"""Streaming speech recognition: one decoder slot per call, feature windows from a ring of buffers."""
import heapq
import logging
import threading
import time

import torch

logger = logging.getLogger("asr")


class Busy(Exception):
    pass


class DecoderSlots:
    """Lowest-numbered slot first, so that the active batch stays dense."""

    def __init__(self, n):
        self._heap = list(range(n))
        self._mu = threading.Lock()

    def checkout(self):
        with self._mu:
            if not self._heap:
                raise Busy("no decoder slot")
            return heapq.heappop(self._heap)  # clean: handed to the caller

    def try_checkout(self):
        with self._mu:
            if not self._heap:
                return -1
            return heapq.heappop(self._heap)  # clean: handed to the caller

    def checkin(self, slot):
        with self._mu:
            heapq.heappush(self._heap, slot)


class FeatureRing:
    def __init__(self, n, frames=3000, mels=80):
        self._store = torch.zeros(n, mels, frames)
        self._idle = list(range(n))
        self._index = {}

    def window(self):
        """A (mels, frames) view, or None when all windows are in use."""
        if not self._idle:
            return None
        i = self._idle.pop()  # clean: the view carries it to the caller
        view = self._store[i]
        self._index[view.data_ptr()] = i
        return view

    def give(self, view):
        self._idle.append(self._index.pop(view.data_ptr()))


class Call:
    def __init__(self, call_id, rate):
        self.call_id = call_id
        self.rate = rate
        self.slot = None
        self.window = None
        self.text = []
        self.last_seen = time.monotonic()


class Recognizer:
    def __init__(self, model, vad, slots, ring, resample):
        self.model = model
        self.vad = vad
        self.slots = slots
        self.ring = ring
        self.resample = resample
        self.calls = {}

    # calls

    def open_call(self, call_id, rate):
        if call_id in self.calls:
            raise ValueError(f"call {call_id} is open")
        call = Call(call_id, rate)
        call.slot = self.slots.checkout()  # leak: the slot is not checked in when no window is free
        call.window = self.ring.window()  # clean: held by the call, hang_up() gives it
        if call.window is None:
            raise Busy("no feature window")
        self.calls[call_id] = call
        return call

    def hang_up(self, call_id):
        call = self.calls.pop(call_id, None)
        if call is None:
            return ""
        self.slots.checkin(call.slot)
        self.ring.give(call.window)
        return " ".join(call.text)

    def reap(self, idle_s):
        now = time.monotonic()
        for call_id in [c.call_id for c in self.calls.values() if now - c.last_seen > idle_s]:
            logger.info("call %s timed out", call_id)
            self.hang_up(call_id)

    def detach(self, call_id):
        """Free the slot of a call whose socket went away; its window stays with it."""
        call = self.calls.pop(call_id)
        self.slots.checkin(call.slot)
        call.slot = None
        return call

    def resume_call(self, old):
        """Re-attach a call that kept its window across a reconnect."""
        slot = self.slots.try_checkout()  # clean: near miss, the refused path has nothing to check in
        if slot < 0:
            return False
        if old.call_id in self.calls:
            self.slots.checkin(slot)
            return False
        old.slot = slot
        self.calls[old.call_id] = old
        return True

    def feed(self, call_id, pcm):
        call = self.calls[call_id]
        call.last_seen = time.monotonic()
        if call.rate != 16000:
            pcm = self.resample(pcm, call.rate)
        if not self.vad(pcm):
            return None
        self.model.frontend(pcm, out=call.window)
        piece = self.model.decode(call.slot, call.window)
        if piece:
            call.text.append(piece)
        return piece

    # one-shot requests

    def featurize(self, pcm):
        win = self.ring.window()  # clean: near miss, None goes on to the caller and else the window does
        if win is not None:
            self.model.frontend(pcm, out=win)
        return win

    def transcribe(self, pcm):
        win = self.featurize(pcm)  # leak: silence returns early with the window still out
        if win is None:
            raise Busy("no feature window")
        if float(win.abs().max()) == 0.0:
            return ""
        slot = self.slots.try_checkout()  # clean: checked in after the decode
        if slot < 0:
            self.ring.give(win)
            raise Busy("no decoder slot")
        text = self.model.decode(slot, win)
        self.slots.checkin(slot)
        self.ring.give(win)
        return text

    def language_of(self, pcm):
        win = self.featurize(pcm)  # clean: given back in finally
        if win is None:
            return None
        try:
            return self.model.classify(win)
        finally:
            self.ring.give(win)

    def speaker_vector(self, pcm):
        feats = self.featurize(pcm)  # leak: only a mean over it is kept, the window is never given
        if feats is None:
            return None
        return feats.mean(dim=-1)

    def transcribe_many(self, clips):
        texts = []
        for pcm in clips:
            slot = self.slots.checkout()  # leak: continue for short clips goes on without a checkin
            if pcm.numel() < 400:
                texts.append("")
                continue
            texts.append(self.model.decode_raw(slot, pcm))
            self.slots.checkin(slot)
        return texts

    def align(self, pcm, text):
        with_window = len(text) > 0
        win = None
        if with_window:
            win = self.ring.window()  # clean: near miss, guard and None test together match the give below
        try:
            return self.model.align(pcm, text, win)
        finally:
            if win is not None:
                self.ring.give(win)

    def drain_pair(self, left, right):
        """Decode the two channels of a stereo call in lockstep."""
        a = self.slots.checkout()  # leak: stays out when the second checkout raises Busy
        b = self.slots.checkout()  # clean: checked in in finally
        try:
            return self.model.decode_raw(a, left), self.model.decode_raw(b, right)
        finally:
            self.slots.checkin(a)
            self.slots.checkin(b)
