"""An upgrade of this program: `up` over the state that an older commit wrote keeps clusters and data."""

from __future__ import annotations

import subprocess
import tarfile
from io import BytesIO
from pathlib import Path

import engine_lifecycle
import pytest
from engine_lifecycle import POOLS, open_project
from engine_runs import ROOT, Run
from simulated_jobs import finish_jobs

#: The last commit before names, networks and pools changed in "First contact". The old program itself runs, from the
#: history of this repository: an exported state would not show what its program registers, and a megabyte of it per
#: cloud would have to be recorded again for each change of the simulation. A shallow clone skips these tests.
BASE = "23ea675"
#: What an upgrade must neither replace nor delete: clusters, buckets, file systems, keys.
PROTECTED = (
    "aws:eks/cluster:Cluster",
    "aws:s3/bucket:Bucket",
    "aws:fsx/lustreFileSystem:LustreFileSystem",
    "aws:kms/key:Key",
    "azure-native:containerservice:ManagedCluster",
    "azure-native:storage:StorageAccount",
    "azure-native:storage:BlobContainer",
    "azure-native:netapp:CapacityPoolVolume",
    "gcp:container/cluster:Cluster",
    "gcp:storage/bucket:Bucket",
    "gcp:filestore/instance:Instance",
    "gcp:kms/cryptoKey:CryptoKey",
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files of the older commit."""
    archive = subprocess.run(["git", "archive", BASE], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"the history of this clone lacks {BASE}: git fetch --unshallow")
    folder = tmp_path_factory.mktemp("base")
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    (folder / ".venv").symlink_to(ROOT / ".venv")
    return folder


@pytest.fixture(scope="module", params=sorted(POOLS))
def upgraded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, kubeconfig: Path, base: Path
) -> tuple[Run, Run]:
    """Return the `up` of the older program, in a cloud that refuses nothing, and the `up` of this one after it."""
    engine_lifecycle.load_sdks(request.param)
    world, server, project = open_project(tmp_path_factory.mktemp("upgrade"), request.param, kubeconfig)
    project.link(base)
    world.is_lenient = True
    before = project.run("up")
    world.is_lenient = False
    # The guide stops runs first: the older program's budget lets no drain through, and new node settings drain nodes.
    finish_jobs(world)
    project.link(ROOT)
    after = project.run("up")
    server.kill()
    return before, after


def test_up_with_this_program_keeps_clusters_buckets_file_systems_and_keys(upgraded: tuple[Run, Run]) -> None:
    before, after = upgraded
    assert before.ok, before.output
    assert {step.type for step in before.of_op("create")} & set(PROTECTED), "the older program created no cluster"
    lost = [step for step in after.changes if step.type in PROTECTED and step.op not in ("update", "create")]
    assert not lost
    assert after.ok, after.output
