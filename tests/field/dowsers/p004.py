"""Copy-engine lanes kept as bits of one int."""
import threading


class LaneMask:
    FULL = 0xFF

    def __init__(self):
        self._mask = self.FULL
        self._mu = threading.Lock()

    def claim_lane(self):
        with self._mu:
            low = self._mask & -self._mask
            if not low:
                return None
            self._mask ^= low
            return low.bit_length() - 1

    def drop_lane(self, lane):
        with self._mu:
            self._mask |= 1 << lane


lanes = LaneMask()


def copy_layer(engine, src, dst):
    lane = lanes.claim_lane()  # clean: dropped in the finally
    if lane is None:
        engine.copy_sync(src, dst)
        return
    try:
        engine.copy_async(src, dst, lane)
        engine.wait(lane)
    finally:
        lanes.drop_lane(lane)


def copy_if_changed(engine, src, dst):
    lane = lanes.claim_lane()  # leak: unchanged source returns with the lane held
    if lane is None:
        return False
    if engine.same(src, dst):
        return False
    engine.copy_async(src, dst, lane)
    engine.wait(lane)
    lanes.drop_lane(lane)
    return True


def start_copy(engine, src, dst):
    lane = lanes.claim_lane()  # clean: handed to the caller
    if lane is not None:
        engine.copy_async(src, dst, lane)
    return lane


def prefetch(engine, src, dst):
    lane = start_copy(engine, src, dst)  # clean: dropped after the wait
    if lane is None:
        return
    engine.wait(lane)
    lanes.drop_lane(lane)


def touch(engine, src, dst):
    start_copy(engine, src, dst)  # leak: the lane returned is dropped
    engine.flush()
