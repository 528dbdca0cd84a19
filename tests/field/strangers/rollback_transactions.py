"""Reserve pages on several devices, all or nothing."""
from contextlib import ExitStack
from typing import NamedTuple


class DevicePages:
    def __init__(self, name, capacity):
        self.name = name
        self.capacity = capacity

    def reserve(self, count):
        if count > self.capacity:
            return None
        self.capacity -= count
        return Reservation(self.name, count)

    def cancel(self, reservation):
        self.capacity += reservation.count


class Reservation(NamedTuple):
    device: str
    count: int


class Plan:
    def __init__(self):
        self.parts = []

    def add(self, device, reservation):
        self.parts.append((device, reservation))

    def undo(self):
        for device, reservation in reversed(self.parts):
            device.cancel(reservation)
        self.parts.clear()


def reserve_everywhere(devices, count):
    plan = Plan()
    for device in devices:
        part = device.reserve(count)  # clean: near miss, undone through the plan when one is short
        if part is None:
            plan.undo()
            return None
        plan.add(device, part)
    return plan


def run_everywhere(devices, count, job):
    plan = reserve_everywhere(devices, count)  # clean: near miss, none-checked, undone in finally
    if plan is None:
        return None
    try:
        return job(plan)
    finally:
        plan.undo()


def reserve_pair(a, b, count):
    left = a.reserve(count)  # clean: near miss, cancelled when the other side is short, else returned
    if left is None:
        return None
    right = b.reserve(count)  # clean: returned with left
    if right is None:
        a.cancel(left)
        return None
    return left, right


def use_pair(a, b, count, job):
    pair = reserve_pair(a, b, count)  # leak: only the first of the two is cancelled
    if pair is None:
        return False
    left, right = pair
    job(left, right)
    a.cancel(left)
    return True


def peek_pair(a, b, count):
    pair = reserve_pair(a, b, count)  # clean: near miss, both parts are cancelled by index
    if pair is None:
        return 0
    total = pair[0].count + pair[1].count
    b.cancel(pair[1])
    a.cancel(pair[0])
    return total


def reserve_stack(devices, count):
    with ExitStack() as stack:
        for device in devices:
            part = device.reserve(count)  # clean: near miss, the stack cancels on early exit and hands over by pop_all
            if part is None:
                return None
            stack.callback(device.cancel, part)
        return stack.pop_all()


def touch_stack(devices, count):
    stack = reserve_stack(devices, count)  # clean: near miss, closing the stack cancels all
    if stack is None:
        return False
    stack.close()
    return True


def dry_stack(devices, count):
    with ExitStack() as stack:
        for device in devices:
            part = device.reserve(count)  # leak: pop_all empties the stack and its result is dropped
            if part is None:
                return False
            stack.callback(device.cancel, part)
        stack.pop_all()
    return True
