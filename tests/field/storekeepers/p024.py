class Reservation:
    def __init__(self, flash, sectors):
        self.flash = flash
        self.sectors = sectors
        self.image = b""

    def commit(self):
        self.flash.reserved -= self.sectors
        self.flash.written += self.sectors

    def cancel(self):
        self.flash.reserved -= self.sectors


class Flash:
    def __init__(self, sectors):
        self.sectors = sectors
        self.reserved = 0
        self.written = 0

    def reserve(self, sectors):
        if self.reserved + self.written + sectors > self.sectors:
            return None
        self.reserved += sectors
        return Reservation(self, sectors)


class Updater:
    """idle -> downloading -> verifying -> idle"""

    def __init__(self, flash):
        self.flash = flash
        self.state = "idle"
        self.update = None
        self.delta = None

    def begin(self, size):
        if self.state != "idle":
            return False
        self.update = self.flash.reserve(size // 4096 + 1)  # leak: a bad digest resets the state only
        if self.update is None:
            return False
        self.state = "downloading"
        return True

    def begin_delta(self, size):
        if self.state != "downloading" or self.delta is not None:
            return False
        self.delta = self.flash.reserve(size // 4096 + 1)  # clean: verify and abandon settle the delta
        return self.delta is not None

    def chunk(self, data):
        if self.state == "downloading":
            self.update.image += data

    def verify(self, digest, expected):
        if self.state != "downloading":
            return False
        if self.delta is not None:
            self.delta.cancel()
            self.delta = None
        self.state = "verifying"
        if digest(self.update.image) != expected:
            self.update = None
            self.state = "idle"
            return False
        self.update.commit()
        self.update = None
        self.state = "idle"
        return True

    def abandon(self):
        for res in (self.update, self.delta):
            if res is not None:
                res.cancel()
        self.update = self.delta = None
        self.state = "idle"


def write_config(flash, blob, store):
    res = flash.reserve(1)  # clean: committed or cancelled
    if res is None:
        return False
    if store(blob):
        res.commit()
        return True
    res.cancel()
    return False
