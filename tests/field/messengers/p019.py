"""Thumbnail service that runs its encoders on an executor."""
import logging
from concurrent.futures import ThreadPoolExecutor

log = logging.getLogger(__name__)


class EncoderBank:
    def __init__(self, encoders):
        self._parked = list(encoders)

    def take_encoder(self):
        return self._parked.pop()

    def park(self, encoder):
        encoder.flush()
        self._parked.append(encoder)


def encode_and_park(bank, encoder, image, quality):
    try:
        return encoder.encode(image, quality)
    finally:
        bank.park(encoder)


def encode_only(encoder, image):
    return encoder.encode(image, 80)


class ThumbnailService:
    def __init__(self, bank, workers=4):
        self.bank = bank
        self.pool = ThreadPoolExecutor(workers)
        self.pending = 0

    def tuned(self, preset):
        encoder = self.bank.take_encoder()  # clean: handed to the caller
        encoder.configure(preset)
        return encoder

    def start(self, image, quality=75):
        encoder = self.tuned("web")  # clean: the task parks it
        self.pending += 1
        return self.pool.submit(encode_and_park, self.bank, encoder, image, quality)

    def start_preview(self, image):
        encoder = self.tuned("preview")  # leak: the task only encodes
        self.pending += 1
        return self.pool.submit(encode_only, encoder, image)

    def start_tracked(self, image):
        encoder = self.tuned("print")  # clean: the done callback parks it
        future = self.pool.submit(encode_only, encoder, image)
        future.add_done_callback(lambda _: self.bank.park(encoder))
        return future

    def start_small(self, image, limit):
        encoder = self.tuned("small")  # leak: an image over the limit starts no task
        if image.size <= limit:
            self.pending += 1
            return self.pool.submit(encode_and_park, self.bank, encoder, image, 60)
        log.info("image of %d bytes skipped", image.size)
        return None

    def encode_now(self, image):
        encoder = self.tuned("web")  # clean: waits for the task, then parks
        data = self.pool.submit(encode_only, encoder, image).result()
        self.bank.park(encoder)
        return data
