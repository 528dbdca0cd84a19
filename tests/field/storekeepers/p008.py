_channels = {}
_default = None


class RadioPool:
    def __init__(self, frequencies):
        self._unused = sorted(frequencies)

    def tune(self):
        return self._unused.pop(0)

    def untune(self, frequency):
        self._unused.append(frequency)
        self._unused.sort()


radios = RadioPool([868.1, 868.3, 868.5, 867.1, 867.3, 867.5])


def attach(device, power):
    """Give a device its own channel."""
    if device in _channels:
        return _channels[device][0]
    frequency = radios.tune()  # leak: reset_all clears the table and gives nothing back
    _channels[device] = (frequency, power)
    return frequency


def detach(device):
    entry = _channels.pop(device, None)
    if entry is None:
        return False
    radios.untune(entry[0])
    return True


def reset_all():
    global _default
    names = sorted(_channels)
    _channels.clear()
    if _default is not None:
        radios.untune(_default)
        _default = None
    return names


def beacon(payload):
    global _default
    if _default is None:
        _default = radios.tune()  # clean: reset_all gives it back
    return "%.1f:%s" % (_default, payload.hex())


class Downlink:
    def __init__(self, device):
        self.device = device
        self.frequency = None
        self.sent = []

    def open(self):
        self.frequency = radios.tune()  # leak: a retry opens anew over the one that is held

    def send(self, frame):
        if self.frequency is None:
            return False
        self.sent.append((self.frequency, frame))
        if len(self.sent) % 8 == 0:
            self.retry()
        return True

    def retry(self):
        self.sent.clear()
        self.open()

    def finish(self):
        if self.frequency is not None:
            radios.untune(self.frequency)
            self.frequency = None
        return len(self.sent)


def pick_channel():
    return radios.tune()  # clean: handed to the caller


def survey(listen, rounds):
    frequency = pick_channel()  # clean: untuned below
    levels = [listen(frequency) for _ in range(rounds)]
    radios.untune(frequency)
    return max(levels, default=0.0)
