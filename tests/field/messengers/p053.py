"""Stages of an audio pipeline that pass one leased block along."""
import array


class BlockStore:
    def __init__(self, count, frames):
        self._blocks = [array.array("f", [0.0]) * frames for _ in range(count)]

    def rent(self):
        return self._blocks.pop()

    def give_up(self, block):
        self._blocks.append(block)


def gain(block, factor):
    for i, value in enumerate(block):
        block[i] = value * factor
    return block


def normalise(block):
    peak = max(map(abs, block)) or 1.0
    return gain(block, 1.0 / peak)


def resample(block, step):
    return array.array("f", block[::step])


class Mixer:
    def __init__(self, store, device):
        self.store = store
        self.device = device
        self.played = 0

    def recorded(self):
        block = self.store.rent()  # clean: handed on, the gain returns the same block
        self.device.record(block)
        return gain(block, 0.9)

    def play(self):
        block = normalise(self.recorded())  # clean: the same block comes back and is given up
        self.device.play(block)
        self.played += len(block)
        self.store.give_up(block)

    def play_fast(self, step):
        block = resample(self.recorded(), step)  # leak: the resampled copy replaces the block
        self.device.play(block)
        self.played += len(block)
        return self.played

    def chain(self, stages):
        block = self.recorded()  # clean: each stage works in place, the block is given up
        for stage in stages:
            stage(block)
        level = max(map(abs, block))
        self.store.give_up(block)
        return level

    def play_half(self):
        block = self.recorded()  # clean: only the copy is played, the block is given up
        half = resample(block, 2)
        self.store.give_up(block)
        self.device.play(half)
        return len(half)

    def loudness(self):
        level = sum(v * v for v in normalise(self.recorded()))  # leak: consumed by the sum
        return level / self.played if self.played else level
