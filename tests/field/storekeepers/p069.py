from contextlib import ExitStack, contextmanager


class CurrentSource:
    def __init__(self, channel):
        self.channel = channel
        self.amps = 0.0


class SourceBox:
    def __init__(self, channels):
        self.box = [CurrentSource(c) for c in range(channels)]

    def enable(self):
        return self.box.pop()

    def disable(self, source):
        source.amps = 0.0
        self.box.append(source)

    @contextmanager
    def session(self, amps):
        source = self.enable()  # clean: disabled in finally
        source.amps = amps
        try:
            yield source
        finally:
            self.disable(source)


class TestBench:
    def __init__(self, box):
        self.box = box
        self.stack = ExitStack()
        self.bias = None
        self.series = {}
        self.readings = []

    def use(self, amps):
        source = self.box.enable()  # clean: the exit stack disables it in finish
        self.stack.callback(self.box.disable, source)
        source.amps = amps
        return source.channel

    def set_bias(self, amps):
        if self.bias is None:
            self.bias = self.box.enable()  # leak: finish empties the stack and sets the bias to None
        self.bias.amps = amps

    def sweep(self, low, high, read):
        with self.box.session(low) as source:  # clean: the session disables it
            while source.amps < high:
                source.amps += 0.1
                self.readings.append(read(source.channel))
        return len(self.readings)

    def start_series(self, name, points):
        if name in self.series:
            return False
        source = self.box.enable()  # leak: next_point removes the series when done and disables nothing
        self.series[name] = [source, iter(points)]
        return True

    def next_point(self, name, read):
        source, points = self.series[name]
        value = next(points, None)
        if value is None:
            del self.series[name]
            return None
        source.amps = value
        return read(source.channel)

    def finish(self):
        self.stack.close()
        self.bias = None
        for source, _ in self.series.values():
            self.box.disable(source)
        self.series = {}
        readings, self.readings = self.readings, []
        return readings
