"""Three frames: one shown, one ready, one that a painter may hold."""
import numpy as np

IDLE, PAINTING, READY, SHOWN = "idle", "painting", "ready", "shown"


class TripleBuffer:
    def __init__(self, h, w):
        self.frames = np.zeros((3, h, w, 4), dtype=np.uint8)
        self.role = [SHOWN, IDLE, IDLE]

    def begin_paint(self):
        for i, role in enumerate(self.role):
            if role == IDLE:
                self.role[i] = PAINTING
                return i
        return None

    def present(self, i):
        for j, role in enumerate(self.role):
            if role == READY:
                self.role[j] = IDLE
        self.role[i] = READY

    def throw_away(self, i):
        self.role[i] = IDLE

    def flip(self):
        if READY in self.role:
            ready, shown = self.role.index(READY), self.role.index(SHOWN)
            self.role[ready], self.role[shown] = SHOWN, IDLE


class Painter:
    def __init__(self, swap, scene):
        self.swap = swap
        self.scene = scene

    def paint(self):
        i = self.swap.begin_paint()  # clean: presented or thrown away
        if i is None:
            return
        done = self.scene.draw(self.swap.frames[i])
        self.swap.present(i) if done else self.swap.throw_away(i)

    def paint_if_changed(self):
        i = self.swap.begin_paint()  # leak: nothing new leaves the frame in painting
        if i is None:
            return False
        if not self.scene.dirty:
            return False
        self.scene.draw(self.swap.frames[i])
        self.swap.present(i)
        return True


def fill(swap, colour):
    i = swap.begin_paint()  # clean: presented
    if i is not None:
        swap.frames[i][:] = colour
        swap.present(i)


def grab_image(swap, scene):
    i = swap.begin_paint()  # leak: the copy is returned and the frame kept
    if i is None:
        return None
    scene.draw(swap.frames[i])
    return swap.frames[i].copy()
