"""Tape drives of an archive; a drive may stay loaded between two requests."""


class DrivePool:
    def __init__(self, drives):
        self._idle = list(drives)

    def load_drive(self, barcode):
        if not self._idle:
            return None
        drive = self._idle.pop()
        drive.load(barcode)
        return drive

    def unload_drive(self, drive):
        drive.eject()
        self._idle.append(drive)


def rewind(drive):
    drive.seek(0)
    return drive.position()


class Archive:
    def __init__(self, drives):
        self.drives = drives
        self.warm = None
        self.retrieved = 0

    def _finish(self, drive, keep):
        self.retrieved += 1
        rewind(drive)
        if not keep:
            self.drives.unload_drive(drive)

    def _park(self, drive):
        if self.warm is not None:
            self.drives.unload_drive(self.warm)
        self.warm = drive

    def retrieve(self, barcode, offset, size):
        drive = self.drives.load_drive(barcode)  # clean: keep is false, so it is unloaded
        if drive is None:
            return None
        drive.seek(offset)
        data = drive.read(size)
        self._finish(drive, keep=False)
        return data

    def retrieve_series(self, barcode, extents):
        drive = self.drives.load_drive(barcode)  # clean: parked as the warm drive
        if drive is None:
            return []
        out = []
        for offset, size in extents:
            drive.seek(offset)
            out.append(drive.read(size))
        self._finish(drive, keep=True)
        self._park(drive)
        return out

    def verify(self, barcode, size):
        drive = self.drives.load_drive(barcode)  # leak: kept by the flag, but parked nowhere
        if drive is None:
            return False
        ok = len(drive.read(size)) == size
        self._finish(drive, keep=ok)
        return ok

    def label(self, barcode):
        drive = self.drives.load_drive(barcode)  # leak: rewind only moves the tape
        if drive is None:
            return ""
        text = drive.read(80).decode("ascii", "replace")
        rewind(drive)
        return text.strip()

    def shut_down(self):
        if self.warm is not None:
            self.drives.unload_drive(self.warm)
            self.warm = None
