"""The trainer's image from its real Dockerfile, and the store of a containerd that holds it, both made once.

The base image is this machine's own Debian or Ubuntu: same release, same mirrors, same certificate authorities. So
a build here reaches what this machine reaches, and no address is written anywhere.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import node_build
from cluster_build import BuildError, say

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "trainer" / "Dockerfile"
#: As `Pulumi.local.yaml` names it; containerd and the kubelet write a name without a registry so.
IMAGE, FULL_NAME = "trainer:dev", "docker.io/library/trainer:dev"
PAUSE = "localhost/pause:1"
BASE = "localhost/base:1"
#: The target that has no stage above it which is fetched from elsewhere than registries of packages.
TARGET = "plain"
#: Raised where this module makes another image or another store of the same sources.
FORM = 1
#: Free space that a build needs: its layers, the packed image, and what containerd unpacks of it (measured 20 GiB).
DISK_GIB = 22
PROGRESS_SECONDS = 10
BUILDS = "build-"
#: containerd's databases: with them as they were after the import, nothing that a node left behind is known.
DATABASES = ("io.containerd.metadata.v1.bolt/meta.db", "io.containerd.snapshotter.v1.overlayfs/metadata.db")
SNAPSHOTS = "io.containerd.snapshotter.v1.overlayfs/snapshots"
#: What a base image needs to reach what this machine reaches.
COPIED = ("/etc/apt/sources.list", "/etc/apt/sources.list.d", "/usr/share/keyrings", "/usr/local/share/ca-certificates")
PIP_FILES = ("/etc/pip.conf", "~/.config/pip/pip.conf", "~/.pip/pip.conf")


def store() -> Path:
    """Containerd's root: its content, its snapshots and its databases."""
    return node_build.cache() / "store"


def record() -> dict[str, Any]:
    """What is in the store: key, size, layers and seconds of the build; empty where no import was completed."""
    path = store() / "image.json"
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def sources() -> list[Path]:
    """The files that the image is made of."""
    found = [path for path in (ROOT / "trainer").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return sorted([*found, ROOT / ".dockerignore", ROOT / "LICENSE"])


def key() -> str:
    """Changes with whatever the image is made of."""
    digest = hashlib.sha256(f"{FORM} {node_build.MODULES['pause'].folder.name}".encode())
    for path in sources():
        digest.update(f"{path.relative_to(ROOT)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def is_built() -> bool:
    """Whether the store holds the image of the present sources."""
    return record().get("key") == key()


@contextmanager
def alone() -> Iterator[None]:
    """One build of the image at a time; what a killed one left, up to 20 GiB, goes first."""
    node_build.cache().mkdir(parents=True, exist_ok=True)
    with (node_build.cache() / "image.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another build of the image")
            fcntl.flock(lock, fcntl.LOCK_EX)
        for left in node_build.cache().glob(f"{BUILDS}*"):
            shutil.rmtree(left)
        yield


def build() -> None:
    """Make the image and put it into the store, unless it is there."""
    with alone():
        if is_built():
            return
        # A store of older sources: 9 GiB that the build has use for. Its record first, as it must not outlive a part.
        (store() / "image.json").unlink(missing_ok=True)
        shutil.rmtree(store(), ignore_errors=True)
        check_disk()
        # What a program that was told to stop still writes there is removed by the next build.
        with tempfile.TemporaryDirectory(prefix=BUILDS, dir=node_build.cache(), ignore_cleanup_errors=True) as folder:
            build_in(Path(folder))


@contextmanager
def built_meanwhile() -> Iterator[None]:
    """The image is made by a process of its own, which waits for disk and network while this one compiles."""
    command = ["setpriv", "--pdeathsig", "TERM", sys.executable, str(Path(__file__).resolve()), "build"]
    # In a session of its own Ctrl-C reaches it once, through this process.
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": node_build.PYTHONPATH},
    )
    try:
        yield
        said, _ = process.communicate()
    except BaseException:
        process.terminate()
        process.communicate()
        raise
    if process.returncode:
        raise BuildError(said.strip() or f"the build of the image ended with {process.returncode}")


@contextmanager
def part(name: str, seconds: dict[str, int]) -> Iterator[None]:
    """One part of a build: it says for how long it has been at work, and notes that in `seconds`."""
    began, ended = time.monotonic(), threading.Event()

    def tell() -> None:
        while not ended.wait(PROGRESS_SECONDS):
            say(f"image: {name}, {time.monotonic() - began:.0f} s")

    say(f"image: {name}")
    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()
        seconds[name] = round(time.monotonic() - began)


def build_in(folder: Path) -> None:
    buildah = Buildah(folder)
    seconds: dict[str, int] = {}
    with part("base image", seconds):
        base_image(buildah, folder / "base")
    # In two parts: what the first leaves besides its layers, 10 GiB, would be there to the end of a single one.
    for target in ("builder", TARGET):
        with part(f"target {target} of trainer/Dockerfile", seconds):
            buildah(
                *("build", "--isolation", "chroot", "--network", "host", "--layers", "--format", "oci"),
                *("--build-arg", f"BASE_IMAGE={BASE}", "--build-arg", "ACCELERATOR=cpu", "--file", str(DOCKERFILE)),
                *("--target", target, "--tag", IMAGE, str(ROOT)),
                shown=True,
            )
            buildah.clean()
    with part("packing", seconds):
        pack(buildah, folder)
    made = {"key": key(), **described(folder / "trainer"), "seconds": seconds}
    with part("unpacking into containerd's store", seconds):
        fill_store([folder / "trainer", folder / "localhost-pause"])
    record_store(made)
    say(f"image: {made['size_gib']} GiB packed, {sum(seconds.values())} s")


def pack(buildah: Buildah, folder: Path) -> None:
    """The trainer's image and the sandbox's as layouts in a folder, and nothing else any more."""
    container = buildah("from", "scratch")
    buildah("copy", "--quiet", container, str(node_build.program("pause")), "/pause")
    buildah("config", "--entrypoint", '["/pause"]', "--user", "65535", container)
    buildah("commit", "--quiet", container, PAUSE)
    for name, full in ((IMAGE, FULL_NAME), (PAUSE, PAUSE)):
        # zstd takes a quarter of gzip's time at the same size.
        where = f"oci:{folder}/{name.partition(':')[0].replace('/', '-')}:{full}"
        buildah("push", "--quiet", "--compression-format", "zstd", "--compression-level", "1", name, where)
    shutil.rmtree(buildah.storage)  # 12 GiB that nothing needs any more


class Buildah:
    """buildah with a store of its own in a folder."""

    def __init__(self, folder: Path) -> None:
        self.storage, self.folder = folder / "storage", folder
        self.clean()

    def clean(self) -> None:
        """Remove what is kept between builds besides layers: the cache of packages."""
        shutil.rmtree(self.folder / "temporary", ignore_errors=True)
        (self.folder / "temporary").mkdir()

    def __call__(self, *arguments: str, shown: bool = False) -> str:
        command = ["buildah", "--root", str(self.storage), "--runroot", str(self.folder / "run"), *arguments]
        return ran(command, shown=shown, TMPDIR=str(self.folder / "temporary"))


def ran(command: Sequence[str], *, shown: bool = False, **environment: str) -> str:
    """What a command printed, also on the terminal where it is `shown`; `BuildError` with its last line."""
    process = subprocess.Popen(
        # A mount of a build goes with its namespace, whatever ends the build.
        ["unshare", "--mount", "setpriv", "--pdeathsig", "TERM", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=None if shown else subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    assert process.stdout is not None
    lines = []
    try:
        for line in process.stdout:
            lines.append(line.rstrip())
            if shown:
                say(f"  {line.rstrip()[:160]}")
        complaint = process.stderr.read() if process.stderr else ""
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if process.wait():
        last = (complaint.strip().splitlines() or lines or ["no output"])[-1]
        raise BuildError(f"`{' '.join(command[:1] + command[5:])}` failed: {last}")
    return lines[-1] if lines else ""


def base_image(buildah: Buildah, root: Path) -> None:
    """A minimal Debian or Ubuntu from this machine's own mirror."""
    mirror, release = mirror_of_this_machine()
    ran(["debootstrap", "--variant=minbase", "--include=ca-certificates", release, str(root), mirror])
    for name in COPIED:
        source, target = Path(name), root / name[1:]
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        elif source.is_file():
            shutil.copy(source, target)
    if not Path("/etc/apt/sources.list").is_file():
        (root / "etc/apt/sources.list").unlink(missing_ok=True)
    options = ran_lines(["apt-config", "dump", "Acquire"])
    (root / "etc/apt/apt.conf.d/99builder").write_text("\n".join(options) + "\n")
    shutil.copy("/etc/ssl/certs/ca-certificates.crt", root / "etc/ssl/certs/ca-certificates.crt")
    for path in (Path(name).expanduser() for name in PIP_FILES):
        if path.is_file():
            shutil.copy(path, root / "etc/pip.conf")
    container = buildah("from", "scratch")
    buildah("copy", "--quiet", container, str(root), "/")
    buildah("config", "--cmd", "/bin/sh", "--env", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin", container)
    buildah("commit", "--quiet", "--rm", container, BASE)
    shutil.rmtree(root)


def mirror_of_this_machine() -> tuple[str, str]:
    """Address and code name of the archive that apt uses here."""
    release = next(
        line.partition("=")[2].strip('"')
        for line in Path("/etc/os-release").read_text().splitlines()
        if line.startswith("VERSION_CODENAME=")
    )
    rows = ran_lines(["apt-get", "indextargets", "--format", "$(CODENAME) $(SITE)", "Created-By: Packages"])
    sites = [site for code, _, site in (row.partition(" ") for row in rows) if code == release]
    if not sites:
        raise BuildError(f"apt knows no archive of {release}; `apt-get update` fetches its lists")
    return sites[0], release


def ran_lines(command: Sequence[str]) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"`{' '.join(command)}` failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    return done.stdout.splitlines()


def described(layout: Path) -> dict[str, Any]:
    """Size and layers of an image as it lies in an OCI layout: GiB packed, and by which instruction each came."""

    def blob(digest: str) -> dict[str, Any]:
        return dict(json.loads((layout / "blobs" / digest.replace(":", "/")).read_text()))

    manifest = blob(json.loads((layout / "index.json").read_text())["manifests"][0]["digest"])
    steps = [step for step in blob(manifest["config"]["digest"])["history"] if not step.get("empty_layer")]
    layers = [
        {"mib": round(layer["size"] / 2**20, 1), "step": step.get("created_by", "")}
        for layer, step in zip(manifest["layers"], steps, strict=True)
    ]
    return {"size_gib": round(sum(layer["mib"] for layer in layers) / 1024, 2), "layers": layers}


def fill_store(layouts: Sequence[Path]) -> None:
    """Import images into a fresh store, and keep its databases as they are then."""
    store().mkdir(parents=True)
    with containerd(store()) as ctr:
        for layout in layouts:
            ctr("images", "import", "--all-platforms=false", "-", archive=layout)
            shutil.rmtree(layout)
    for name in DATABASES:
        clean = store() / "clean" / name
        clean.parent.mkdir(parents=True)
        shutil.copy(store() / name, clean)


def record_store(made: dict[str, Any]) -> None:
    """Note what is in the store, which is complete now."""
    made["snapshots"] = sorted(path.name for path in (store() / SNAPSHOTS).iterdir())
    (store() / "image.json").write_text(json.dumps(made, indent=1))


def restore() -> None:
    """Forget what an earlier node made in the store: its containers, their snapshots, its sandboxes."""
    known = set(record()["snapshots"])
    for name in DATABASES:
        shutil.copy(store() / "clean" / name, store() / name)
    for path in (store() / SNAPSHOTS).iterdir():
        if path.name not in known:
            shutil.rmtree(path)
    for path in store().glob("io.containerd.*"):
        if path.name.startswith(("io.containerd.grpc", "io.containerd.runtime")):
            shutil.rmtree(path)


@contextmanager
def containerd(root: Path) -> Iterator[Callable[..., None]]:
    """A containerd for the time of an import, in namespaces that take its mounts and processes with them."""
    with tempfile.TemporaryDirectory(prefix="torchrec-import-") as state:
        socket = f"{state}/socket"
        command = ["containerd", "--root", str(root), "--state", f"{state}/state", "--address", socket]
        isolate = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        log = (Path(state) / "log").open("w+")
        server = subprocess.Popen([*isolate, *command], stdout=log, stderr=log, stdin=subprocess.DEVNULL)

        def ctr(*arguments: str, archive: Path) -> None:
            tar = subprocess.Popen(["tar", "--create", "--directory", str(archive), "."], stdout=subprocess.PIPE)
            done = subprocess.run(
                ["ctr", "--address", socket, "--namespace", "k8s.io", *arguments],
                stdin=tar.stdout,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode or tar.wait():
                raise BuildError(f"containerd did not take {archive.name}: {done.stderr.strip()}")

        try:
            deadline = time.monotonic() + 60
            while not Path(socket).exists():
                if server.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise BuildError(f"containerd did not start: {log.read()[-300:]}")
                time.sleep(0.1)
            yield ctr
        finally:
            server.kill()  # `unshare`, which passes no other signal on; the databases are transactional
            server.wait()
            log.close()


def check_disk() -> None:
    node_build.cache().mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(node_build.cache()).free / 2**30
    if free < DISK_GIB:
        mend = "free some, or set XDG_CACHE_HOME to a folder on another disk"
        raise BuildError(f"{node_build.cache()} has {free:.1f} GiB free, building the image needs {DISK_GIB}: {mend}")


def main(arguments: Sequence[str]) -> int:
    """Show what is in the store; with `build`, make it: 2 with the reason on standard output, 130 when told to stop."""
    if arguments != ["build"]:
        sys.stdout.write(json.dumps(record(), indent=1) + "\n")
        return 0

    def stop(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        build()
    except BuildError as error:
        sys.stdout.write(f"{error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
