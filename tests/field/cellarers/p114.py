"""Lanes of a multi-channel data-acquisition card, flags in numpy."""
import numpy as np


class LaneBoard:
    def __init__(self, lanes):
        self.busy = np.zeros(lanes, dtype=bool)
        self.gain = np.ones(lanes)

    def take_lane(self):
        idle = np.flatnonzero(~self.busy)
        if idle.size == 0:
            return -1
        lane = int(idle[0])
        self.busy[lane] = True
        return lane

    def drop_lane(self, lane):
        self.busy[lane] = False
        self.gain[lane] = 1.0


class Acquisition:
    def __init__(self, board, card):
        self.board = board
        self.card = card

    def sample(self, probe, n):
        lane = self.board.take_lane()  # clean: dropped in finally
        if lane < 0:
            return np.empty(0)
        try:
            return self.card.read(lane, probe, n)
        finally:
            self.board.drop_lane(lane)

    def calibrate(self, probe, target):
        lane = self.board.take_lane()  # leak: a flat signal returns with the lane busy
        if lane < 0:
            return None
        level = float(np.abs(self.card.read(lane, probe, 256)).mean())
        if level == 0.0:
            return None
        gain = target / level
        self.board.drop_lane(lane)
        return gain

    def noise_floor(self, probes):
        floors = {}
        for probe in probes:
            lane = self.board.take_lane()  # clean: the loop ends on -1, otherwise dropped
            if lane == -1:
                break
            floors[probe] = float(self.card.read(lane, probe, 64).std())
            self.board.drop_lane(lane)
        return floors

    def stereo(self, left, right, n):
        lane = self.board.take_lane()  # leak: overwritten by the second lane
        a = self.card.read(lane, left, n)
        lane = self.board.take_lane()  # clean: dropped before the return
        b = self.card.read(lane, right, n)
        self.board.drop_lane(lane)
        return np.stack([a, b])
