import abc


class StreamPool:
    def __init__(self, n):
        self._streams = list(range(n))

    def get_stream(self):
        return self._streams.pop()

    def recycle(self, stream):
        self._streams.append(stream)


class Stage(abc.ABC):
    def __init__(self, streams, name):
        self.streams = streams
        self.name = name
        self.compute = streams.get_stream()  # clean: close recycles it
        self.closed = False

    @abc.abstractmethod
    def forward(self, x):
        ...

    def close(self):
        if self.closed:
            return
        self.closed = True
        self.streams.recycle(self.compute)


class Encoder(Stage):
    def __init__(self, streams, depth):
        super().__init__(streams, "encoder")
        self.depth = depth
        self.copy = streams.get_stream()  # leak: the inherited close knows nothing of it

    def forward(self, x):
        for _ in range(self.depth):
            x = x + self.copy
        return x


class Decoder(Stage):
    def __init__(self, streams, heads):
        super().__init__(streams, "decoder")
        self.heads = heads
        self.sample = streams.get_stream()  # clean: the overriding close recycles it

    def forward(self, x):
        return [x * (h + 1) for h in range(self.heads)]

    def close(self):
        if not self.closed:
            self.streams.recycle(self.sample)
        super().close()


class Projector(Stage):
    def __init__(self, streams, width):
        super().__init__(streams, "projector")
        self.width = width
        self.side = {}

    def forward(self, x):
        if x not in self.side:
            self.side[x] = self.streams.get_stream()  # leak: close clears the table without recycle
        return self.side[x] + self.width

    def close(self):
        self.side.clear()
        super().close()


def run(streams, stages, x):
    copy = streams.get_stream()  # clean: recycled after the loop
    for stage in stages:
        x = stage.forward(x)
    streams.recycle(copy)
    for stage in stages:
        stage.close()
    return x
