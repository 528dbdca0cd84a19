from typing import Any, Dict, TypedDict


class GateKeys:
    def __init__(self, keys):
        self._keys = sorted(keys)
        self.handed = 0

    def hand_out(self):
        self.handed += 1
        return self._keys.pop(0)

    def collect(self, key):
        self.handed -= 1
        self._keys.append(key)


class Slot(TypedDict):
    key: str
    meta: Dict[str, Any]


class Sensor:
    def __init__(self, name):
        self.name = name
        self.state: Dict[str, Slot] = {}
        self.battery = 100


class Hub:
    """Sensors by name; each keeps its pairings in a dict of records."""

    def __init__(self, keys):
        self.keys = keys
        self.sensors: Dict[str, Sensor] = {}
        self.admin = {"key": keys.hand_out(), "meta": {}}  # clean: power_off collects it

    def register(self, name):
        if name not in self.sensors:
            self.sensors[name] = Sensor(name)
        return self.sensors[name]

    def pair(self, name, channel, **meta):
        sensor = self.register(name)
        if channel in sensor.state:
            sensor.state[channel]["meta"].update(meta)
            return
        key = self.keys.hand_out()  # leak: replace puts a new sensor there and its pairings are gone
        sensor.state[channel] = {"key": key, "meta": dict(meta)}

    def unpair(self, name, channel):
        slot = self.sensors[name].state.pop(channel, None)
        if slot is not None:
            self.keys.collect(slot["key"])

    def rekey(self, name, channel):
        slot = self.sensors[name].state[channel]
        old = slot["key"]
        slot["key"] = self.keys.hand_out()  # leak: replace loses it together with the pairing
        self.keys.collect(old)
        return slot["key"]

    def replace(self, name):
        old = self.sensors[name]
        self.sensors[name] = Sensor(name)
        return old.battery

    def guest(self, action):
        key = self.keys.hand_out()  # clean: collected below
        result = action(key)
        self.keys.collect(key)
        return result

    def power_off(self):
        for name, sensor in self.sensors.items():
            for channel in list(sensor.state):
                self.unpair(name, channel)
        self.sensors.clear()
        self.keys.collect(self.admin["key"])
