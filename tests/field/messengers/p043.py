"""Lease of a label printer, kept with cached properties and default factories."""
from dataclasses import dataclass, field
from functools import cached_property


class LabelPrinters:
    def __init__(self, names):
        self._names = list(names)

    def claim_printer(self):
        return self._names.pop()

    def disclaim(self, name):
        self._names.append(name)


PRINTERS = LabelPrinters(f"zebra{i}" for i in range(12))


@dataclass
class Parcel:
    weight: float
    printer: str = field(default_factory=PRINTERS.claim_printer)
    labels: list = field(default_factory=list)

    def add_label(self, text):
        self.labels.append(f"{self.printer}: {text}")

    def close(self):
        PRINTERS.disclaim(self.printer)


class PackingLine:
    def __init__(self, wire):
        self.wire = wire
        self.total = 0.0

    @cached_property
    def printer(self):
        return PRINTERS.claim_printer()  # clean: cached on the line until stop

    def stop(self):
        name = self.__dict__.pop("printer", None)
        if name is not None:
            PRINTERS.disclaim(name)

    def pack(self, weight, texts):
        parcel = Parcel(weight)  # clean: closed after the labels
        for text in texts:
            parcel.add_label(text)
        self.wire.print_all(parcel.labels)
        parcel.close()
        self.total += weight

    def repack(self, weight, printer, texts):
        parcel = Parcel(weight, printer)  # clean: handed to the caller
        for text in texts:
            parcel.add_label(text)
        self.wire.print_all(parcel.labels)
        return parcel

    def weigh(self, grams):
        parcel = Parcel(grams / 1000)  # leak: the default factory claims, close is not called
        self.total += parcel.weight
        return parcel.weight

    def blank(self):
        self.repack(0.0, PRINTERS.claim_printer(), [" "])  # leak: the parcel that comes back is dropped

    def banner(self, text):
        parcel = self.repack(0.0, PRINTERS.claim_printer(), [text])  # clean: the parcel is closed
        parcel.close()
        return len(parcel.labels)
