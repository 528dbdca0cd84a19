"""Request handling between TCP and serial side."""
from __future__ import annotations

import logging
import struct

from .bus import BusHandle, BusRegistry, SerialBus
from .transactions import TransactionIds

log = logging.getLogger("modbus.gateway")


def open_bus(registry: BusRegistry, routes: dict[int, str], unit: int) -> BusHandle:
    return BusHandle(registry, routes.get(unit, routes[0]), wait=0.5)  # clean: the caller closes


def open_in_turn(registry: BusRegistry, routes: dict[int, str], unit: int) -> BusHandle | None:
    handle = open_bus(registry, routes, unit)  # clean: returned in turn, else closed
    if not handle.in_turn:
        handle.close()
        return None
    return handle


def read_registers(registry: BusRegistry, routes: dict[int, str], unit: int, start: int, count: int):
    handle = open_in_turn(registry, routes, unit)  # leak: an exception answer of the device returns unclosed
    if handle is None:
        return None
    reply = handle.bus.exchange(struct.pack(">BBHH", unit, 3, start, count), 5 + 2 * count)
    if reply[1] & 0x80:
        log.warning("unit %d answers exception %d", unit, reply[2])
        return None
    handle.close()
    return struct.unpack_from(">%dH" % count, reply, 3)


def write_register(registry: BusRegistry, routes: dict[int, str], unit: int, address: int, value: int) -> bool:
    with open_bus(registry, routes, unit) as handle:  # clean: context manager, both returns inside
        if not handle.in_turn:
            return False
        frame = struct.pack(">BBHH", unit, 6, address, value)
        return handle.bus.exchange(frame, 8)[:6] == frame


def scan_units(registry: BusRegistry, device: str, last: int) -> list[int]:
    found = []
    bus = registry.attach(device)  # clean: detached after the scan
    for unit in range(1, last + 1):
        if not bus.take_turn(0.2):  # leak: a silent unit continues and the turn never ends
            continue
        reply = bus.exchange(struct.pack(">BB", unit, 17), 5)
        if not reply:
            continue
        found.append(unit)
        bus.end_turn()
    registry.detach(bus)
    return found


def device_clock(registry: BusRegistry, device: str) -> int:
    bus = registry.attach(device)  # clean: detached in the outer finally
    try:
        if not bus.take_turn(1.0):  # clean: ended in the inner finally
            return -1
        try:
            return int.from_bytes(bus.exchange(b"\x00\x2b\x0e", 8), "big")
        finally:
            bus.end_turn()
    finally:
        registry.detach(bus)


def bridge(registry: BusRegistry, source: str, target: str, frames: list[bytes]) -> int:
    left = registry.attach(source)  # clean: detached at the end
    right = registry.attach(target) if target != source else left  # leak: only the source bus is detached
    moved = 0
    for frame in frames:
        answer = left.exchange(frame, 256)
        if answer:
            right.exchange(answer, 0)
            moved += 1
    registry.detach(left)
    return moved


def forward(ids: TransactionIds, socket, pdu: bytes) -> bytes | None:
    ident = ids.reserve()  # clean: retired after the answer, zero means none
    if ident == 0:
        return None
    socket.sendall(struct.pack(">HHH", ident, 0, len(pdu)) + pdu)
    header = socket.recv(6)
    answer = socket.recv(struct.unpack(">HHH", header)[2])
    ids.retire(ident)
    return answer


def forward_burst(ids: TransactionIds, socket, pdus: list[bytes]) -> int:
    sent: dict[int, bytes] = {}
    for pdu in pdus:
        ident = ids.reserve()  # clean: near miss, collected by id and all retired below
        if not ident:
            break
        sent[ident] = pdu
        socket.sendall(struct.pack(">HHH", ident, 0, len(pdu)) + pdu)
    for _ in sent:
        socket.recv(260)
    for ident in sent:
        ids.retire(ident)
    return len(sent)


def first_meter(registry: BusRegistry, devices: list[str]) -> str | None:
    def probe(bus: SerialBus) -> bool:
        return bool(bus.exchange(b"\x01\x11", 5))

    bus = registry.attach_first(devices, probe)  # leak: only its name is used, the attachment stays
    return bus.device if bus is not None else None
