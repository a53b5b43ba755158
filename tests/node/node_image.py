"""Build the trainer's image from its Dockerfile, and a containerd store that holds it, both once.

The base image copies this machine's Debian or Ubuntu: release, mirrors and certificate authorities. So a build can
reach the same servers as this machine, and no address is hard-coded.
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
#: The name in `Pulumi.local.yaml`, and the full name that containerd and the kubelet use for it.
IMAGE, FULL_NAME = "trainer:dev", "docker.io/library/trainer:dev"
PAUSE = "localhost/pause:1"
BASE = "localhost/base:1"
#: The Dockerfile target that downloads only from package registries.
TARGET = "plain"
#: Increase it if this module builds another image or store from the same sources.
FORM = 1
#: Free space that a build needs: layers, packed image and unpacked image (measured 20 GiB).
DISK_GIB = 22
PROGRESS_SECONDS = 10
BUILDS = "build-"
#: containerd's databases; restoring them after the import removes all records of earlier nodes.
DATABASES = ("io.containerd.metadata.v1.bolt/meta.db", "io.containerd.snapshotter.v1.overlayfs/metadata.db")
SNAPSHOTS = "io.containerd.snapshotter.v1.overlayfs/snapshots"
#: Files that the base image needs to reach the same servers as this machine.
COPIED = ("/etc/apt/sources.list", "/etc/apt/sources.list.d", "/usr/share/keyrings", "/usr/local/share/ca-certificates")
PIP_FILES = ("/etc/pip.conf", "~/.config/pip/pip.conf", "~/.pip/pip.conf")


def store() -> Path:
    """Return the root folder of containerd: content, snapshots and databases."""
    return node_build.cache() / "store"


def record() -> dict[str, Any]:
    """Return key, size, layers and build seconds of the stored image; empty if no import is complete."""
    path = store() / "image.json"
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def sources() -> list[Path]:
    """Return the files that the image is built from."""
    found = [path for path in (ROOT / "trainer").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return sorted([*found, ROOT / ".dockerignore", ROOT / "LICENSE"])


def key() -> str:
    """Return a hash of everything that the image is built from."""
    digest = hashlib.sha256(f"{FORM} {node_build.MODULES['pause'].folder.name}".encode())
    for path in sources():
        digest.update(f"{path.relative_to(ROOT)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def is_built() -> bool:
    """Return whether the store holds the image of the current sources."""
    return record().get("key") == key()


@contextmanager
def lock_image() -> Iterator[None]:
    """Allow one build at a time; first delete the files of killed builds, up to 20 GiB."""
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
    """Build the image and import it into the store, if it is missing."""
    with lock_image():
        if is_built():
            return
        # Delete a store of older sources: the build needs its 9 GiB. The record goes first, so it never describes a
        # partial store.
        (store() / "image.json").unlink(missing_ok=True)
        shutil.rmtree(store(), ignore_errors=True)
        check_disk()
        # A stopped program may still write there; the next build deletes those files.
        with tempfile.TemporaryDirectory(prefix=BUILDS, dir=node_build.cache(), ignore_cleanup_errors=True) as folder:
            build_in(Path(folder))


@contextmanager
def build_in_background() -> Iterator[None]:
    """Build the image in a separate process: it waits for disk and network while this process compiles."""
    command = ["setpriv", "--pdeathsig", "TERM", sys.executable, str(Path(__file__).resolve()), "build"]
    # In a separate session Ctrl-C reaches it only once, through this process.
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
        output, _ = process.communicate()
    except BaseException:
        process.terminate()
        process.communicate()
        raise
    if process.returncode:
        raise BuildError(output.strip() or f"the build of the image exited with {process.returncode}")


@contextmanager
def build_step(name: str, seconds: dict[str, int]) -> Iterator[None]:
    """Run one step of a build: log its progress, and store its duration in `seconds`."""
    began, ended = time.monotonic(), threading.Event()

    def log_progress() -> None:
        while not ended.wait(PROGRESS_SECONDS):
            say(f"image: {name}, {time.monotonic() - began:.0f} s")

    say(f"image: {name}")
    logger = threading.Thread(target=log_progress, daemon=True)
    logger.start()
    try:
        yield
    finally:
        ended.set()
        logger.join()
        seconds[name] = round(time.monotonic() - began)


def build_in(folder: Path) -> None:
    buildah = Buildah(folder)
    seconds: dict[str, int] = {}
    with build_step("base image", seconds):
        build_base_image(buildah, folder / "base")
    # Two builds: a single build would keep 10 GiB of temporary files of the first target until the end.
    for target in ("builder", TARGET):
        with build_step(f"target {target} of trainer/Dockerfile", seconds):
            buildah(
                *("build", "--isolation", "chroot", "--network", "host", "--layers", "--format", "oci"),
                *("--build-arg", f"BASE_IMAGE={BASE}", "--build-arg", "ACCELERATOR=cpu", "--file", str(DOCKERFILE)),
                *("--target", target, "--tag", IMAGE, str(ROOT)),
                shown=True,
            )
            buildah.clean()
    with build_step("packing", seconds):
        pack(buildah, folder)
    image = {"key": key(), **describe(folder / "trainer"), "seconds": seconds}
    with build_step("unpacking into containerd's store", seconds):
        fill_store([folder / "trainer", folder / "localhost-pause"])
    record_store(image)
    say(f"image: {image['size_gib']} GiB packed, {sum(seconds.values())} s")


def pack(buildah: Buildah, folder: Path) -> None:
    """Write the trainer's image and the sandbox image as OCI layouts, and delete the build's storage."""
    container = buildah("from", "scratch")
    buildah("copy", "--quiet", container, str(node_build.program("pause")), "/pause")
    buildah("config", "--entrypoint", '["/pause"]', "--user", "65535", container)
    buildah("commit", "--quiet", container, PAUSE)
    for name, full in ((IMAGE, FULL_NAME), (PAUSE, PAUSE)):
        # zstd takes a quarter of gzip's time at the same size.
        layout = f"oci:{folder}/{name.partition(':')[0].replace('/', '-')}:{full}"
        buildah("push", "--quiet", "--compression-format", "zstd", "--compression-level", "1", name, layout)
    shutil.rmtree(buildah.storage)  # 12 GiB that are no longer needed


class Buildah:
    """buildah with its own storage in a folder."""

    def __init__(self, folder: Path) -> None:
        self.storage, self.folder = folder / "storage", folder
        self.clean()

    def clean(self) -> None:
        """Delete the package cache, which buildah keeps between builds in addition to layers."""
        shutil.rmtree(self.folder / "temporary", ignore_errors=True)
        (self.folder / "temporary").mkdir()

    def __call__(self, *arguments: str, shown: bool = False) -> str:
        command = ["buildah", "--root", str(self.storage), "--runroot", str(self.folder / "run"), *arguments]
        return run_command(command, shown=shown, TMPDIR=str(self.folder / "temporary"))


def run_command(command: Sequence[str], *, shown: bool = False, **environment: str) -> str:
    """Run a command and return its last line, if `shown` print its output; raise BuildError if it fails."""
    process = subprocess.Popen(
        # In its own namespace, the mounts of a build end with it, even if it is killed.
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
        errors = process.stderr.read() if process.stderr else ""
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if process.wait():
        last = (errors.strip().splitlines() or lines or ["no output"])[-1]
        raise BuildError(f"`{' '.join(command[:1] + command[5:])}` failed: {last}")
    return lines[-1] if lines else ""


def build_base_image(buildah: Buildah, root: Path) -> None:
    """Build a minimal Debian or Ubuntu from this machine's own mirror."""
    mirror, release = find_mirror()
    run_command(["debootstrap", "--variant=minbase", "--include=ca-certificates", release, str(root), mirror])
    for name in COPIED:
        source, target = Path(name), root / name[1:]
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        elif source.is_file():
            shutil.copy(source, target)
    if not Path("/etc/apt/sources.list").is_file():
        (root / "etc/apt/sources.list").unlink(missing_ok=True)
    options = run_and_split(["apt-config", "dump", "Acquire"])
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


def find_mirror() -> tuple[str, str]:
    """Return address and code name of the archive that apt uses on this machine."""
    release = next(
        line.partition("=")[2].strip('"')
        for line in Path("/etc/os-release").read_text().splitlines()
        if line.startswith("VERSION_CODENAME=")
    )
    rows = run_and_split(["apt-get", "indextargets", "--format", "$(CODENAME) $(SITE)", "Created-By: Packages"])
    sites = [site for code, _, site in (row.partition(" ") for row in rows) if code == release]
    if not sites:
        raise BuildError(f"apt has no archive of {release}. Fix: apt-get update")
    return sites[0], release


def run_and_split(command: Sequence[str]) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"`{' '.join(command)}` failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    return done.stdout.splitlines()


def describe(layout: Path) -> dict[str, Any]:
    """Return the packed size of an image in an OCI layout, and its layers with their instructions."""

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
    """Import images into a new store, and back up its databases."""
    store().mkdir(parents=True)
    with containerd(store()) as ctr:
        for layout in layouts:
            ctr("images", "import", "--all-platforms=false", "-", archive=layout)
            shutil.rmtree(layout)
    for name in DATABASES:
        clean = store() / "clean" / name
        clean.parent.mkdir(parents=True)
        shutil.copy(store() / name, clean)


def record_store(image: dict[str, Any]) -> None:
    """Record the content of the store, which is now complete."""
    image["snapshots"] = sorted(path.name for path in (store() / SNAPSHOTS).iterdir())
    (store() / "image.json").write_text(json.dumps(image, indent=1))


def restore() -> None:
    """Delete what an earlier node added to the store: containers, snapshots and sandboxes."""
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
    """Run a containerd during an import, in namespaces that end with its mounts and processes."""
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
                raise BuildError(f"containerd did not import {archive.name}: {done.stderr.strip()}")

        try:
            deadline = time.monotonic() + 60
            while not Path(socket).exists():
                if server.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise BuildError(f"containerd did not start: {log.read()[-300:]}")
                time.sleep(0.1)
            yield ctr
        finally:
            server.kill()  # `unshare` forwards no other signal; the databases are transactional
            server.wait()
            log.close()


def check_disk() -> None:
    node_build.cache().mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(node_build.cache()).free / 2**30
    if free < DISK_GIB:
        fix = "free space, or set XDG_CACHE_HOME to a folder on another disk"
        raise BuildError(
            f"not enough disk space in {node_build.cache()}: got {free:.1f} GiB; needed: {DISK_GIB} GiB. Fix: {fix}"
        )


def main(arguments: Sequence[str]) -> int:
    """Print the content of the store, or `build` it; return 2 after printing an error, 130 if interrupted."""
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
