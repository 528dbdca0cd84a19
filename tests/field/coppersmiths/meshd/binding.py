from dataclasses import dataclass, field
from typing import Dict, List, Optional

from .inventory import RackSet, Tray


@dataclass
class Mesh:
    job: str
    trays: List[Tray] = field(default_factory=list)
    spare: Optional[Tray] = None


class MeshBinder:
    def __init__(self, racks: RackSet):
        self.racks = racks
        self.bound: Dict[str, Mesh] = {}

    def bind(self, job: str, n: int, want_spare: bool = False) -> Optional[Mesh]:
        if job in self.bound:
            return None
        mesh = Mesh(job)
        while len(mesh.trays) < n:
            t = self.racks.pull()  # clean: release_mesh() empties an incomplete mesh
            if t is None:
                self.release_mesh(mesh)
                return None
            mesh.trays.append(t)
        if want_spare:
            mesh.spare = self.racks.pull()  # clean: release_mesh() slides the spare in too
        self.bound[job] = mesh
        return mesh

    def release_mesh(self, mesh: Mesh) -> None:
        while mesh.trays:
            self.racks.slide_in(mesh.trays.pop())
        if mesh.spare is not None:
            self.racks.slide_in(mesh.spare)
            mesh.spare = None

    def unbind(self, job: str) -> bool:
        mesh = self.bound.pop(job, None)  # clean: released
        if mesh is None:
            return False
        self.release_mesh(mesh)
        return True

    def unbind_if_idle(self, job: str) -> bool:
        mesh = self.bound.pop(job, None)  # leak: a busy mesh is popped from bound and forgotten
        if mesh is None:
            return False
        if any(t.users for t in mesh.trays):
            return False
        self.release_mesh(mesh)
        return True

    def replace(self, mesh: Mesh, index: int) -> bool:
        fresh = self.racks.pull()  # clean: takes the place of the old tray
        if fresh is None:
            return False
        worn, mesh.trays[index] = mesh.trays[index], fresh
        self.racks.slide_in(worn)
        return True

    def replace_failed(self, mesh: Mesh) -> int:
        swapped = 0
        for i, t in enumerate(mesh.trays):
            fresh = self.racks.pull()  # leak: pulled for trays that are fine too, then continue
            if fresh is None:
                break
            if t.firmware_ok:
                continue
            mesh.trays[i] = fresh
            self.racks.slide_in(t)
            swapped += 1
        return swapped
