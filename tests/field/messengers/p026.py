"""Ports of a media relay; a relay needs one inbound and one outbound port."""

NO_PORT = object()


class PortRange:
    def __init__(self, low, high):
        self._ports = list(range(low, high))

    def bind_port(self):
        return self._ports.pop() if self._ports else NO_PORT

    def unbind(self, port):
        self._ports.append(port)


class Relay:
    def __init__(self, inbound, outbound):
        self.inbound = inbound
        self.outbound = outbound
        self.packets = 0


class RelayServer:
    def __init__(self, low, high):
        self.inner = PortRange(low, high)
        self.outer = PortRange(high, high + 500)
        self.relays = {}
        self.refused = 0

    def _inner_port(self, call):
        if call in self.relays:
            return NO_PORT
        return self.inner.bind_port()  # clean: handed to the caller

    def connect(self, call):
        a = self._inner_port(call)  # clean: unbound when the outer port is refused
        if a is NO_PORT:
            self.refused += 1
            return False
        b = self.outer.bind_port()  # clean: kept in the relay
        if b is NO_PORT:
            self.inner.unbind(a)
            return False
        self.relays[call] = Relay(a, b)
        return True

    def connect_eager(self, call):
        a = self._inner_port(call)  # leak: the outer one is refused and this one stays bound
        b = self.outer.bind_port()  # clean: unbound or kept
        if a is NO_PORT:
            if b is not NO_PORT:
                self.outer.unbind(b)
            return False
        if b is NO_PORT:
            self.refused += 1
            return False
        self.relays[call] = Relay(a, b)
        return True

    def reserve_for(self, call):
        port = self._inner_port(call)  # leak: compared with None, returned early on odd ports
        if port is None or port is NO_PORT:
            return False
        if port % 2:
            self.refused += 1
            return False
        self.relays[call] = Relay(port, None)
        return True

    def hang_up(self, call):
        relay = self.relays.pop(call, None)
        if relay is None:
            return 0
        self.inner.unbind(relay.inbound)
        if relay.outbound is not None:
            self.outer.unbind(relay.outbound)
        return relay.packets
