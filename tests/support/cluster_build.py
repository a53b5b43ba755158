"""Build the programs of a real Kubernetes control plane once, from their Go modules.

Versions and checksums come from `go/*/go.mod` and `go.sum`. The user's cache holds the programs in a folder named after
a hash of their sources; a folder appears only when it is complete. An interrupted build resumes from Go's own cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

GO = Path(__file__).resolve().parents[1] / "cluster" / "go"
#: Space for Go's caches, the programs and temporary files (measured 5.3 GB), with a margin.
DISK_GIB = 7
PROGRESS_SECONDS = 5
PARTIAL = ".partial"
#: No symbols and no local paths.
FLAGS, STRIP = ("-trimpath", "-ldflags"), "-s -w"


class BuildError(Exception):
    """The reason why a build failed, in one line."""


@dataclass(frozen=True)
class Module:
    """One folder of `go/` and the programs built in it."""

    name: str
    programs: dict[str, str]
    #: Go variables for the version that servers report, and the module whose version they get.
    stamps: tuple[str, ...] = ()
    stamped_with: str = ""

    @property
    def source(self) -> Path:
        return GO / self.name

    @property
    def folder(self) -> Path:
        """The folder of its programs; the name changes with every version, checksum and flag."""
        key = hashlib.sha256(repr((self, FLAGS, platform.machine())).encode())
        for name in ("go.mod", "go.sum"):
            key.update((self.source / name).read_bytes())
        return cache() / f"{self.name}-{key.hexdigest()[:12]}"

    @property
    def is_built(self) -> bool:
        return all((self.folder / program).is_file() for program in self.programs)

    @property
    def linker_flags(self) -> str:
        if not self.stamps:
            return STRIP
        version = go("list", "-m", "-f", "{{.Version}}", self.stamped_with, folder=self.source).strip()
        major, minor = version.removeprefix("v").split(".")[:2]
        values = {"gitVersion": version, "gitMajor": major, "gitMinor": minor}
        stamped = [f"-X {stamp}.{name}={value}" for stamp in self.stamps for name, value in values.items()]
        return " ".join([STRIP, *stamped])


MODULES = {
    "kubernetes": Module(
        "kubernetes",
        {"etcd": "go.etcd.io/etcd/server/v3"}
        | {
            name: f"k8s.io/kubernetes/cmd/{name}"
            for name in ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
        },
        stamps=("k8s.io/component-base/version", "k8s.io/client-go/pkg/version"),
        stamped_with="k8s.io/kubernetes",
    ),
    "kwok": Module("kwok", {"kwok": "sigs.k8s.io/kwok/cmd/kwok"}),
    "training-operator": Module(
        "training-operator", {"training-operator": "github.com/kubeflow/training-operator/cmd/training-operator.v1"}
    ),
    "trainer": Module(
        "trainer",
        {
            "trainer-controller-manager": "github.com/kubeflow/trainer/v2/cmd/trainer-controller-manager",
            "jobset": "sigs.k8s.io/jobset",
        },
    ),
}


def cache() -> Path:
    """Return the folder of built programs in the user's cache."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(configured) if configured else Path.home() / ".cache") / "torchrec-cloud" / "cluster"


def program(name: str) -> Path:
    """Return the path of a built program."""
    (module,) = (module for module in MODULES.values() if name in module.programs)
    return module.folder / name


def go(*arguments: str, folder: Path) -> str:
    """Return the output of a go command; raise BuildError with its last line if it fails."""
    done = subprocess.run(
        ["go", *arguments], cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no output"]
        raise BuildError(f"`go {' '.join(arguments)}` in {folder} failed: {lines[-1]}")
    return done.stdout


def environment() -> dict[str, str]:
    """Return variables for static builds from the committed checksums, without the user's workspace or flags."""
    return os.environ | {"CGO_ENABLED": "0", "GOWORK": "off", "GOFLAGS": "-mod=readonly -buildvcs=false"}


def source(module: str, path: str) -> Path:
    """Return the folder of a dependency in Go's module cache; download it if needed and check its checksum."""
    return Path(json.loads(go("mod", "download", "-json", path, folder=GO / module))["Dir"])


def obstacle() -> str | None:
    """Return why this machine can neither use nor build the programs, or None."""
    if platform.system() != "Linux":
        return f"the control plane is built for Linux, this is {platform.system()}"
    if shutil.which("go") is None:
        return "Go is not installed: it builds the control plane and downloads the operators' CRDs"
    return None


def missing(modules: Iterable[Module] = MODULES.values()) -> list[Module]:
    """Return the modules whose programs are not in the cache."""
    return [module for module in modules if not module.is_built]


def build(modules: Iterable[Module] = MODULES.values()) -> None:
    """Build the missing programs of some modules; other processes wait for the build."""
    requested = list(modules)
    with lock_cache():
        if missing(requested):
            check_disk()
        todo = missing(requested)
        for number, module in enumerate(todo, 1):
            build_module(module, f"[{number}/{len(todo)}] {module.name}")


def check_disk() -> None:
    for folder in (go("env", "GOCACHE", folder=GO), go("env", "GOMODCACHE", folder=GO), str(cache())):
        existing = Path(folder.strip())
        while not existing.exists():
            existing = existing.parent
        free = shutil.disk_usage(existing).free / 2**30
        if free < DISK_GIB:
            fix = "free space, or set GOCACHE, GOMODCACHE and XDG_CACHE_HOME to folders on another disk"
            raise BuildError(
                f"not enough disk space in {existing}: got {free:.1f} GiB; needed: {DISK_GIB} GiB. Fix: {fix}"
            )


@contextmanager
def lock_cache() -> Iterator[None]:
    """Hold the lock of the cache; log if another build holds it."""
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another build of the control plane")
            fcntl.flock(lock, fcntl.LOCK_EX)
        for left in cache().glob(f"*{PARTIAL}"):  # from killed builds
            shutil.rmtree(left)
        yield


def build_module(module: Module, title: str) -> None:
    """Compile into a temporary folder and rename it, so that an interrupted build never looks complete."""
    say(f"{title}: fetching modules")
    packages = sorted(module.programs.values())
    total = len(go("list", "-deps", *packages, folder=module.source).split())
    target = Path(tempfile.mkdtemp(prefix=f"{module.name}-", suffix=PARTIAL, dir=cache()))
    try:
        for name, package in module.programs.items():
            command = ["go", "build", "-v", *FLAGS, module.linker_flags, "-o", str(target / name), package]
            compile_program(command, module, f"{title}: {name}", total)
        shutil.rmtree(module.folder, ignore_errors=True)
        target.rename(module.folder)
    finally:
        shutil.rmtree(target, ignore_errors=True)
    say(f"{title}: done")


def compile_program(command: list[str], module: Module, title: str, total: int) -> None:
    """Run one `go build -v`; it prints each package that it compiles, and error messages."""
    started, lines = time.monotonic(), []
    process = subprocess.Popen(command, cwd=module.source, env=environment(), stderr=subprocess.PIPE, text=True)

    def read() -> None:
        assert process.stderr is not None
        lines.extend(line.rstrip() for line in process.stderr)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        while reader.is_alive():
            reader.join(PROGRESS_SECONDS)
            seconds = round(time.monotonic() - started)
            say(f"{title}: {len(lines)} of at most {total} packages compiled, {seconds} s")
    except BaseException:
        process.terminate()
        raise
    finally:
        process.wait()
    if process.returncode:
        raise BuildError(f"{title}: `{' '.join(command)}` in {module.source} failed: {' | '.join(lines[-3:])}")


def say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def main() -> int:
    """Build what is missing; return 2 if that fails, 130 after Ctrl-C."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    if reason := obstacle():
        say(f"error: {reason}")
        return 2
    try:
        build()
    except BuildError as error:
        say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        say("stopped; run the same command to resume")
        return 130
    say(f"the control plane is in {cache()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
