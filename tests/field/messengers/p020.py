"""Frame grabber: a capture half and a display half joined by a queue."""
import queue


class FrameStore:
    def __init__(self, count, nbytes):
        self._clean = [bytearray(nbytes) for _ in range(count)]

    def lend(self):
        return self._clean.pop() if self._clean else None

    def restore(self, frame):
        self._clean.append(frame)


class Capture:
    def __init__(self, store, camera, out):
        self.store = store
        self.camera = camera
        self.out = out
        self.dropped = 0
        self.running = True

    def step(self):
        frame = self.store.lend()  # clean: the display half restores it
        if frame is None:
            self.dropped += 1
            return
        self.camera.read_into(frame)
        self.out.put(frame)

    def step_nowait(self):
        frame = self.store.lend()  # leak: a full queue drops the frame
        if frame is None:
            self.dropped += 1
            return
        self.camera.read_into(frame)
        try:
            self.out.put_nowait(frame)
        except queue.Full:
            self.dropped += 1

    def step_sharp(self, threshold):
        frame = self.store.lend()  # clean: queued or restored
        if frame is None:
            return False
        self.camera.read_into(frame)
        if self.camera.sharpness(frame) < threshold:
            self.store.restore(frame)
            return False
        self.out.put(frame)
        return True

    def exposure(self):
        frame = self.store.lend()  # leak: neither queued nor restored after a dark frame
        if frame is None:
            return 0.0
        self.camera.read_into(frame)
        level = sum(frame) / len(frame)
        if level < 1.0:
            return 0.0
        self.store.restore(frame)
        return level


class Display:
    def __init__(self, store, source, screen):
        self.store = store
        self.source = source
        self.screen = screen

    def loop(self):
        while True:
            frame = self.source.get()
            if frame is None:
                return
            self.screen.blit(frame)
            self.store.restore(frame)


def wire(store, camera, screen):
    line = queue.Queue(maxsize=4)
    return Capture(store, camera, line), Display(store, line, screen)
