"""Transfer channels of a backup agent behind an abstract base."""
import abc


class ChannelPool:
    def __init__(self, channels):
        self._idle = list(channels)

    def open_channel(self):
        return self._idle.pop()

    def close_channel(self, channel):
        channel.reset()
        self._idle.append(channel)


class Shipper(abc.ABC):
    def __init__(self, pool):
        self.pool = pool
        self.shipped = 0

    @abc.abstractmethod
    def finish(self, channel):
        """Called once with the channel of each shipment."""

    def connect(self, label):
        channel = self.pool.open_channel()  # clean: handed to the caller
        channel.write(f"BEGIN {label}\n".encode())
        return channel

    def header(self, channel, chunks):
        channel.write(str(len(chunks)).encode())
        return sum(len(chunk) for chunk in chunks)


class DirectShipper(Shipper):
    def finish(self, channel):
        channel.write(b"END\n")
        self.pool.close_channel(channel)

    def ship(self, label, chunks):
        channel = self.connect(label)  # clean: finish closes it
        self.header(channel, chunks)
        for chunk in chunks:
            channel.write(chunk)
            self.shipped += len(chunk)
        self.finish(channel)

    def dry_run(self, label, chunks):
        channel = self.connect(label)  # leak: header only writes and measures
        return self.header(channel, chunks)


class BufferedShipper(Shipper):
    def __init__(self, pool, keep):
        super().__init__(pool)
        self.keep = keep
        self.parked = []

    def finish(self, channel):
        if len(self.parked) < self.keep:
            self.parked.append(channel)
        else:
            self.pool.close_channel(channel)

    def ship(self, label, chunks):
        channel = self.parked.pop() if self.parked else self.connect(label)  # clean: parked or closed
        for chunk in chunks:
            channel.write(chunk)
        self.finish(channel)

    def shutdown(self):
        while self.parked:
            self.pool.close_channel(self.parked.pop())


class NullShipper(Shipper):
    def finish(self, channel):
        self.shipped += 1

    def ship(self, label, chunks):
        channel = self.connect(label)  # leak: this finish only counts
        self.header(channel, [])
        self.finish(channel)
