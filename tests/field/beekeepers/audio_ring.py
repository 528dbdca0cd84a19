"""Audio server: ring of period buffers, voices for the mixer and gain ramps."""
from __future__ import annotations

import array
import contextlib
import logging
from collections import deque
from dataclasses import dataclass
from typing import Iterator, Optional

log = logging.getLogger("audio")
PERIOD = 256
_SCRATCH: list[array.array] = []
_SCRATCH_OUT = 0


def scratch_get() -> array.array:
    """Module-wide scratch buffers for resampling; scratch_put() takes them back."""
    global _SCRATCH_OUT
    _SCRATCH_OUT += 1
    return _SCRATCH.pop() if _SCRATCH else array.array("f", bytes(4 * PERIOD))


def scratch_put(buffer: array.array) -> None:
    global _SCRATCH_OUT
    _SCRATCH_OUT -= 1
    _SCRATCH.append(buffer)


@dataclass(eq=False)
class Period:
    index: int
    samples: array.array
    frames: int = 0


class PeriodRing:
    """Producer side: reserve() then commit() or abandon(). Consumer side: consume() then recycle()."""

    def __init__(self, count: int) -> None:
        self._empty = deque(Period(i, array.array("f", bytes(4 * PERIOD))) for i in range(count))
        self._ready: deque[Period] = deque()

    def reserve(self) -> Optional[Period]:
        return self._empty.popleft() if self._empty else None

    def commit(self, period: Period, frames: int) -> None:
        period.frames = frames
        self._ready.append(period)

    def abandon(self, period: Period) -> None:
        self._empty.appendleft(period)

    def consume(self) -> Optional[Period]:
        return self._ready.popleft() if self._ready else None

    def recycle(self, period: Period) -> None:
        period.frames = 0
        self._empty.append(period)


class VoiceBank:
    def __init__(self, count: int) -> None:
        self._idle = set(range(count))

    def start(self) -> int:
        return self._idle.pop() if self._idle else -1

    def stop(self, voice: int) -> None:
        self._idle.add(voice)


class CaptureThread:
    def __init__(self, ring: PeriodRing, device) -> None:
        self.ring = ring
        self.device = device
        self.xruns = 0

    def capture(self) -> bool:
        period = self.ring.reserve()  # leak: a short read returns without commit or abandon
        if period is None:
            self.xruns += 1
            return False
        got = self.device.read_into(period.samples)
        if got <= 0:
            return False
        self.ring.commit(period, got)
        return True

    def capture_gated(self, threshold: float) -> bool:
        period = self.ring.reserve()  # clean: committed or abandoned
        if period is None:
            return False
        got = self.device.read_into(period.samples)
        if got <= 0 or max(period.samples[:got]) < threshold:
            self.ring.abandon(period)
            return False
        self.ring.commit(period, got)
        return True


class PlaybackThread:
    def __init__(self, ring: PeriodRing, device) -> None:
        self.ring = ring
        self.device = device
        self.playing: Optional[Period] = None
        self.muted = False

    def tick(self) -> None:
        """Called by the interrupt: what was playing is done, queue the next one."""
        if self.playing is not None:
            self.ring.recycle(self.playing)
        self.playing = self.ring.consume()  # clean: near miss, recycled at the next tick or by halt
        if self.playing is not None:
            self.device.queue(self.playing.samples, self.playing.frames)

    def halt(self) -> None:
        if self.playing is not None:
            self.ring.recycle(self.playing)
            self.playing = None

    def drain(self) -> int:
        frames = 0
        while True:
            period = self.ring.consume()  # leak: a muted stream goes round without recycling
            if period is None:
                return frames
            frames += period.frames
            if self.muted:
                continue
            self.device.queue(period.samples, period.frames)
            self.device.wait()
            self.ring.recycle(period)

    def flush(self) -> int:
        dropped = 0
        while (period := self.ring.consume()) is not None:  # clean: recycled in each round
            dropped += period.frames
            self.ring.recycle(period)
        return dropped


class Note:
    def __init__(self, voice: int, pitch: float, length: int) -> None:
        self.voice = voice
        self.pitch = pitch
        self.left = length


class Mixer:
    def __init__(self, voices: VoiceBank) -> None:
        self.voices = voices
        self.notes: list[Note] = []
        self.loops: dict[str, Note] = {}

    def note_on(self, pitch: float, length: int) -> bool:
        voice = self.voices.start()  # clean: near miss, advance() stops the voice of a note that ended
        if voice < 0:
            return False
        self.notes.append(Note(voice, pitch, length))
        return True

    def advance(self, frames: int) -> int:
        still = []
        for note in self.notes:
            note.left -= frames
            if note.left > 0:
                still.append(note)
            else:
                self.voices.stop(note.voice)
        self.notes = still
        return len(still)

    def all_off(self) -> None:
        for note in self.notes:
            self.voices.stop(note.voice)
        self.notes = []
        for name in list(self.loops):
            self.loop_off(name)

    def loop_on(self, name: str, pitch: float) -> bool:
        voice = self.voices.start()  # leak: a loop that runs already answers True and the new voice is lost
        if voice < 0:
            return False
        if name in self.loops:
            self.loops[name].pitch = pitch
            return True
        self.loops[name] = Note(voice, pitch, 0)
        return True

    def loop_off(self, name: str) -> None:
        note = self.loops.pop(name, None)
        if note is not None:
            self.voices.stop(note.voice)

    def preview(self, pitch: float, render) -> bytes:
        voice = self.voices.start()  # clean: stopped in the finally, guarded by the same test
        try:
            return render(pitch, 0.8 if voice >= 0 else 0.0)
        finally:
            if voice >= 0:
                self.voices.stop(voice)


@contextlib.contextmanager
def scratch() -> Iterator[array.array]:
    buffer = scratch_get()  # clean: put back in the finally
    try:
        yield buffer
    finally:
        scratch_put(buffer)


def resample(samples: array.array, ratio: float) -> array.array:
    """Result in a scratch buffer, which belongs to the caller; ratio one answers a copy too."""
    out = scratch_get()  # clean: returned
    for i in range(PERIOD):
        out[i] = samples[min(int(i * ratio), len(samples) - 1)]
    return out


def peak(samples: array.array, ratio: float) -> float:
    return max(abs(s) for s in resample(samples, ratio))  # leak: the scratch buffer ends with the expression


def loudness(samples: array.array, ratio: float) -> float:
    out = resample(samples, ratio)  # clean: put back before the return
    total = sum(s * s for s in out)
    scratch_put(out)
    return (total / PERIOD) ** 0.5


def crossfade(a: array.array, b: array.array, target: array.array) -> None:
    with scratch() as ramp:  # clean: context manager
        for i in range(PERIOD):
            ramp[i] = i / PERIOD
            target[i] = a[i] * (1 - ramp[i]) + b[i] * ramp[i]


def chain(samples: array.array, ratios: list[float]) -> array.array:
    out = resample(samples, 1.0)  # leak: replaced by the next stage without being put back
    for ratio in ratios:
        out = resample(out, ratio)  # leak: replaced in the next round, only the last is returned
    return out


def chain_tidy(samples: array.array, ratios: list[float]) -> array.array:
    out = resample(samples, 1.0)  # clean: put back when replaced, else returned
    for ratio in ratios:
        stage = resample(out, ratio)  # clean: near miss, becomes out
        scratch_put(out)
        out = stage
    return out
