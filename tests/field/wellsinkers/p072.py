"""Reasons not to collect: the collector is off while any cookie is out."""
import gc
import itertools
import logging

log = logging.getLogger(__name__)
_cookies = itertools.count(1000)
_reasons = {}


def inhibit(reason):
    if not _reasons:
        gc.disable()
    cookie = next(_cookies)
    _reasons[cookie] = reason
    log.debug("collector inhibited: %s", reason)
    return cookie


def uninhibit(cookie):
    reason = _reasons.pop(cookie, None)
    if reason is not None and not _reasons:
        gc.enable()
        log.debug("collector back after: %s", reason)


class AudioCallback:
    def __init__(self, device, mixer):
        self.device = device
        self.mixer = mixer
        self.cookie = None

    def start(self):
        self.cookie = inhibit("audio")  # clean: stored, ended by stop
        self.device.start(self.mixer)

    def stop(self):
        self.device.stop()
        uninhibit(self.cookie)
        self.cookie = None

    def test_tone(self, seconds):
        cookie = inhibit("tone")  # leak: a missing device returns with the collector off
        if not self.device.present:
            return False
        self.device.play_sine(440.0, seconds)
        uninhibit(cookie)
        return True


def load_objects(reader):
    cookie = inhibit("load")  # clean: ended in finally
    try:
        return [reader.build(row) for row in reader.rows()]
    finally:
        uninhibit(cookie)


def timed(work, clock):
    inhibit("timing")  # leak: cookie dropped
    start = clock()
    work()
    return clock() - start


def quiet_copy(src, dst):
    cookie = inhibit("copy")  # clean: ended after the copy
    dst.extend(src)
    uninhibit(cookie)
