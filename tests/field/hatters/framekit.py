"""Per-frame resources of the simulator that feeds the RL trainers."""
from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple


class Exhausted(Exception):
    pass


class Handle(NamedTuple):
    index: int
    generation: int


class SlotMap:
    def __init__(self):
        self._values = []
        self._gens = []
        self._holes = []
        self.alive = 0

    def spawn(self, value):
        if self._holes:
            i = self._holes.pop()
            self._values[i] = value
        else:
            i = len(self._values)
            self._values.append(value)
            self._gens.append(0)
        self.alive += 1
        return Handle(i, self._gens[i])

    def despawn(self, handle):
        if self._gens[handle.index] != handle.generation:
            raise KeyError(handle)
        self._values[handle.index] = None
        self._gens[handle.index] += 1
        self._holes.append(handle.index)
        self.alive -= 1

    def get(self, handle):
        if self._gens[handle.index] != handle.generation:
            return None
        return self._values[handle.index]


class Turret:
    def __init__(self, world):
        self.world = world
        self.target = None

    def aim(self, marker):
        self.target = self.world.spawn(marker)  # leak: aiming again overwrites the marker's handle

    def dismantle(self):
        if self.target is not None:
            self.world.despawn(self.target)
            self.target = None


class Beacon:
    def __init__(self, world):
        self.world = world
        self.lit = None

    def light(self, colour):
        if self.lit is not None:
            self.world.despawn(self.lit)
        self.lit = self.world.spawn(colour)  # clean: near miss, the old handle is despawned before the overwrite

    def douse(self):
        if self.lit is not None:
            self.world.despawn(self.lit)
            self.lit = None


class FrameArena:
    """Bump memory of one frame; nested marks are popped in order."""

    def __init__(self, size):
        self._mem = bytearray(size)
        self._top = 0
        self._marks = []
        self.peak = 0

    def push_mark(self):
        self._marks.append(self._top)
        return len(self._marks) - 1

    def pop_mark(self):
        self._top = self._marks.pop()

    def bump(self, n):
        if self._top + n > len(self._mem):
            raise Exhausted(n)
        view = memoryview(self._mem)[self._top : self._top + n]
        self._top += n
        self.peak = max(self.peak, self._top)
        return view


def blend_pose(arena, bones):
    arena.push_mark()  # clean: popped before the return
    tmp = arena.bump(16 * len(bones))  # clean: goes with the popped mark
    for i, bone in enumerate(bones):
        tmp[i * 16] = bone & 0xFF
    total = sum(tmp[::16])
    arena.pop_mark()
    return total


def cull(arena, objects):
    arena.push_mark()  # leak: Exhausted is caught and answered with the mark still pushed
    try:
        flags = arena.bump(len(objects))  # clean: if it was got, it goes with the popped mark
    except Exhausted:
        return list(objects)
    for i, obj in enumerate(objects):
        flags[i] = obj.visible
    kept = [o for i, o in enumerate(objects) if flags[i]]
    arena.pop_mark()
    return kept


class ParticlePool:
    """Intrusive free list: a dead particle's link names the next dead one."""

    END = -1

    def __init__(self, n):
        self.x = [0.0] * n
        self.ttl = [0] * n
        self._link = list(range(1, n)) + [self.END]
        self._head = 0 if n else self.END

    def wake(self):
        i = self._head
        if i == self.END:
            return None
        self._head = self._link[i]
        self._link[i] = self.END
        return i

    def lull(self, i):
        self._link[i] = self._head
        self._head = i


class Fountain:
    def __init__(self, particles):
        self.particles = particles
        self.flying = []

    def emit(self, n):
        for _ in range(n):
            i = self.particles.wake()  # clean: near miss, kept in flying until step lulls it
            if i is None:
                break
            self.particles.ttl[i] = 30
            self.flying.append(i)

    def step(self):
        keep = []
        for i in self.flying:
            self.particles.ttl[i] -= 1
            if self.particles.ttl[i] <= 0:
                self.particles.lull(i)
            else:
                keep.append(i)
        self.flying = keep


class Sparks:
    def __init__(self, particles):
        self.particles = particles
        self.flying = deque()

    def emit(self, x, floor):
        i = self.particles.wake()  # leak: below the floor it is dropped, neither kept nor lulled
        if i is None:
            return False
        self.particles.x[i] = x
        if x < floor:
            return False
        self.flying.append(i)
        return True

    def clear(self):
        while self.flying:
            self.particles.lull(self.flying.popleft())


class Rect(NamedTuple):
    x: int
    y: int
    w: int
    h: int


@dataclass
class Shelf:
    y: int
    height: int
    gaps: list


class TextureAtlas:
    """Shelf packing with gaps a shelf."""

    def __init__(self, width, height):
        self.width, self.height = width, height
        self._shelves = []
        self._next_y = 0

    def place(self, w, h):
        for shelf in self._shelves:
            if shelf.height < h:
                continue
            for k, (x, gw) in enumerate(shelf.gaps):
                if gw >= w:
                    shelf.gaps[k] = (x + w, gw - w)
                    return Rect(x, shelf.y, w, h)
        if self._next_y + h > self.height or w > self.width:
            return None
        self._shelves.append(Shelf(self._next_y, h, [(w, self.width - w)]))
        self._next_y += h
        return Rect(0, self._shelves[-1].y, w, h)

    def erase(self, rect):
        for shelf in self._shelves:
            if shelf.y == rect.y:
                shelf.gaps.append((rect.x, rect.w))
                return
        raise KeyError(rect)


class GlyphSet:
    def __init__(self, atlas):
        self.atlas = atlas
        self.rects = {}

    def glyph(self, ch, w, h):
        rect = self.rects.get(ch)
        if rect is not None and rect.w >= w:
            return rect
        rect = self.atlas.place(w, h)  # leak: a too narrow older entry for the glyph is overwritten without erase
        if rect is None:
            return None
        self.rects[ch] = rect
        return rect

    def drop(self):
        for rect in self.rects.values():
            self.atlas.erase(rect)
        self.rects.clear()


def upload_decal(atlas, gpu, image):
    rect = atlas.place(image.w, image.h)  # clean: erased if the upload fails, else returned
    if rect is None:
        return None
    if not gpu.upload(rect, image.pixels):
        atlas.erase(rect)
        return None
    return rect


@dataclass(order=True)
class Voice:
    priority: int
    channel: int
    clip: object = None


class VoiceBank:
    def __init__(self, channels=32):
        self._idle = list(range(channels))
        heapq.heapify(self._idle)
        self._sounding = {}
        self.steals = 0

    def sound(self, clip, priority=0):
        if not self._idle:
            return None
        ch = heapq.heappop(self._idle)
        self._sounding[ch] = Voice(priority, ch, clip)
        return self._sounding[ch]

    def silence(self, voice):
        if self._sounding.pop(voice.channel, None) is not None:
            heapq.heappush(self._idle, voice.channel)


def play_cue(bank, mixer, clip):
    voice = bank.sound(clip)  # clean: silenced once mixed
    if voice is None:
        return 0
    frames = mixer.render(voice)
    bank.silence(voice)
    return frames


def crossfade(bank, mixer, old_clip, new_clip):
    out = bank.sound(old_clip)  # leak: when no second voice is free it returns with the first sounding
    inn = bank.sound(new_clip) if out else None  # clean: silenced at the end
    if out is None or inn is None:
        return False
    mixer.ramp(out, inn)
    bank.silence(out)
    bank.silence(inn)
    return True


class InputEvents:
    """Events of a frame, consumed in order."""

    def __init__(self):
        self._q = deque(maxlen=256)

    def post(self, ev):
        self._q.append(ev)

    def take(self):
        return self._q.popleft() if self._q else None

    def put_back(self, ev):
        self._q.appendleft(ev)


def handle_inputs(events, player):
    while True:
        ev = events.take()  # clean: an event is consumed, not lent
        if ev is None:
            return
        if ev.kind == "noop":
            continue
        player.apply(ev)
