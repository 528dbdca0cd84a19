"""Teardown lists of an acceptance-test rig."""


class PowerSockets:
    def __init__(self, sockets):
        self._unused = list(sockets)

    def plug(self):
        return self._unused.pop()

    def unplug(self, socket):
        self._unused.append(socket)


class Rig:
    def __init__(self, sockets, meter):
        self.sockets = sockets
        self.meter = meter
        self.teardown = []
        self.notes = []

    def powered(self, device):
        socket = self.sockets.plug()  # clean: the teardown list unplugs it
        self.teardown.append((self.sockets.unplug, socket))
        device.connect(socket)
        return device

    def noted(self, device):
        socket = self.sockets.plug()  # leak: the teardown entry only notes its name
        self.teardown.append((self.notes.append, str(socket)))
        device.connect(socket)
        return device

    def raw(self, device):
        socket = self.sockets.plug()  # clean: handed to the caller
        device.connect(socket)
        return socket

    def run_teardown(self):
        while self.teardown:
            fn, argument = self.teardown.pop()
            fn(argument)

    def burn_in(self, devices, hours):
        ready = [self.powered(device) for device in devices]  # clean: unplugged by the teardown
        for device in ready:
            device.run(hours)
        self.run_teardown()
        return len(ready)

    def standby_watts(self, device):
        socket = self.raw(device)  # clean: unplugged after the reading
        watts = self.meter.watts(socket)
        self.sockets.unplug(socket)
        return watts

    def peak_watts(self, devices):
        peak, where = 0.0, None
        for device in devices:
            socket = self.raw(device)  # leak: only the socket with the peak is unplugged
            watts = self.meter.watts(socket)
            if watts > peak:
                if where is not None:
                    self.sockets.unplug(where)
                peak, where = watts, socket
        if where is not None:
            self.sockets.unplug(where)
        return peak
