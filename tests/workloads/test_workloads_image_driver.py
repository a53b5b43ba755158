"""The driver that GKE and Vertex AI mount at run time: the loader finds it only by the image's LD_LIBRARY_PATH."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from infra.clouds.gcp import fabric

ROOT = Path(__file__).resolve().parents[2]
#: `-container-path` of GKE's device plug-in, below which it mounts the driver:
#: https://pkg.go.dev/github.com/GoogleCloudPlatform/container-engine-accelerators/cmd/nvidia_gpu
LIBRARIES = "/usr/local/nvidia/lib64"
PROGRAM = """
#include <dlfcn.h>
int main(void) { return !dlopen("libcuda.so.1", RTLD_NOW); }
"""
#: Hides this machine's /usr/local in a mount namespace, puts the driver where GKE mounts it, and starts the program
#: without the rights of root.
MOUNT = """
set -e
mount -t tmpfs -o mode=0755 tmpfs /usr/local
mkdir -p -m 0755 /usr/local/nvidia {libraries}
install -m 0755 {folder}/libcuda.so.1 {libraries}
install -m 0755 {folder}/program /usr/local
exec setpriv --reuid 10001 --regid 0 --clear-groups --no-new-privs env -i {variables} /usr/local/program
"""

pytestmark = pytest.mark.skipif(
    not all(shutil.which(name) for name in ("gcc", "unshare", "setpriv"))
    or subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode != 0,
    reason="needs gcc, and the right to mount",
)


def _image_variables() -> Mapping[str, str]:
    """Return the variables that the image's ENV sets for the loader."""
    text = (ROOT / "trainer" / "Dockerfile").read_text()
    return dict(re.findall(r"^\s*(?:ENV )?(LD_\w+)=(\S+)", text, re.MULTILINE))


def _is_loaded(folder: Path, variables: Mapping[str, str]) -> bool:
    """Return whether a non-root process with these variables loads the mounted driver."""
    (folder / "program.c").write_text(PROGRAM)
    (folder / "driver.c").write_text("int cuInit(unsigned flags) { return 0; }")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "driver.c"], check=True)
    subprocess.run(["gcc", "-o", folder / "program", folder / "program.c", "-ldl"], check=True)
    words = " ".join(f"{name}={value}" for name, value in variables.items())
    script = MOUNT.format(libraries=LIBRARIES, folder=folder, variables=words)
    code = subprocess.run(["unshare", "--mount", "sh", "-c", script], check=False).returncode
    assert code in (0, 1), "the program did not start"
    return code == 0


def test_a_driver_mounted_at_run_time_is_found_by_the_images_variables(tmp_path: Path) -> None:
    assert _is_loaded(tmp_path, _image_variables())


def test_without_them_it_is_not_found(tmp_path: Path) -> None:
    assert not _is_loaded(tmp_path, {})


def test_the_fabrics_use_the_same_folder() -> None:
    assert fabric._LIBRARIES == LIBRARIES
