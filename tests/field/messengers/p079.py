"""Shared-memory mailboxes between a planner and its motor controllers."""
import struct


class Mailboxes:
    def __init__(self, count):
        self._empty = [bytearray(32) for _ in range(count)]

    def open_box(self):
        return self._empty.pop() if self._empty else None

    def shut_box(self, box):
        self._empty.append(box)


class Command:
    """Writes into a box that belongs to somebody else."""

    def __init__(self, box, axis):
        self.box = box
        self.axis = axis

    def write(self, position, speed):
        struct.pack_into("<Bff", self.box, 0, self.axis, position, speed)
        return len(self.box)


class OwnedCommand(Command):
    def __init__(self, boxes, box, axis):
        super().__init__(box, axis)
        self.boxes = boxes

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.boxes.shut_box(self.box)


class Planner:
    def __init__(self, boxes, motors):
        self.boxes = boxes
        self.motors = motors
        self.moves = 0

    def command(self, axis):
        box = self.boxes.open_box()  # clean: owned by the command that is returned
        return OwnedCommand(self.boxes, box, axis) if box is not None else None

    def move(self, axis, position):
        command = self.command(axis)  # clean: used in a with
        if command is None:
            return False
        with command:
            command.write(position, 1.0)
            self.motors.post(axis, command.box)
        self.moves += 1
        return True

    def nudge(self, axis):
        box = self.boxes.open_box()  # leak: a plain Command does not own the box
        if box is None:
            return 0
        command = Command(box, axis)
        size = command.write(0.1, 0.1)
        self.motors.post(axis, command.box)
        return size

    def stop(self, axes):
        box = self.boxes.open_box()  # clean: one box for all, shut at the end
        if box is None:
            return
        for axis in axes:
            Command(box, axis).write(0.0, 0.0)
            self.motors.post(axis, box)
        self.boxes.shut_box(box)

    def home(self, axis):
        command = self.command(axis)  # leak: written and posted outside a with
        if command is None:
            return False
        command.write(0.0, 0.5)
        self.motors.post(axis, command.box)
        return self.motors.at_home(axis)
