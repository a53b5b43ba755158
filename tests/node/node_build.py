"""The parts of a real node: Debian packages, and programs built from Go modules."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import cluster_build
import cluster_plane

GO = Path(__file__).resolve().parent / "go"
#: PYTHONPATH for the programs of this folder that run as separate processes.
PYTHONPATH = os.pathsep.join([str(Path(__file__).resolve().parent), str(Path(cluster_build.__file__).parent)])
CNI = Path("/usr/lib/cni")
#: Required programs, and the Debian and Ubuntu package of each.
PACKAGES = {
    "containerd": "containerd",
    "runc": "runc",
    "buildah": "buildah",
    "debootstrap": "debootstrap",
    "ip": "iproute2",
    str(CNI / "bridge"): "containernetworking-plugins",
}
INSTALL = "`make node-packages` installs them"


@dataclass(frozen=True)
class NodeModule(cluster_build.Module):
    """One folder of `tests/node/go`; a hash of its sources is part of its name in the cache."""

    @property
    def source(self) -> Path:
        return GO / self.name

    @property
    def folder(self) -> Path:
        own = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(self.source.rglob("*.go"))))
        return super().folder.with_name(f"{super().folder.name}-{own.hexdigest()[:6]}")


MODULES = {
    module.name: module
    for module in (
        NodeModule(
            "kubelet",
            {"kubelet": "k8s.io/kubernetes/cmd/kubelet"},
            stamps=("k8s.io/component-base/version",),
            stamped_with="k8s.io/kubernetes",
        ),
        NodeModule("coredns", {"coredns": "."}),
        NodeModule("pause", {"pause": "."}),
    )
}
#: The modules that every node needs; only some tests need the operators' modules.
NEEDED = (cluster_build.MODULES["kubernetes"], *MODULES.values())


def program(name: str) -> Path:
    """Return the path of a built program."""
    (module,) = (module for module in MODULES.values() if name in module.programs)
    return module.folder / name


def cache() -> Path:
    """Return the folder that keeps the image and containerd's store between nodes."""
    return cluster_build.cache().parent / "node"


def obstacle() -> str | None:
    """Return why no node can run on this machine, or None."""
    if platform.system() != "Linux":
        return f"a node needs Linux, this is {platform.system()}"
    if os.geteuid() != 0:
        return f"a node needs root, this is user {os.geteuid()}"
    if absent := missing_packages():
        return f"not installed: {', '.join(absent)}; {INSTALL}"
    return cluster_build.obstacle() or cluster_plane.obstacle()


def missing_packages() -> list[str]:
    """Return the Debian packages of the missing programs."""
    return sorted({package for name, package in PACKAGES.items() if shutil.which(name) is None})


if __name__ == "__main__":
    sys.stdout.write(f"{' '.join(sorted({*PACKAGES.values()}))}\n")
