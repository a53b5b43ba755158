"""Google Cloud: the bucket and Filestore."""

from __future__ import annotations

from typing import Any

import pytest
from gcp_stack import BUCKET, FILESTORE, Stack
from provider_mocks.recording import Recording


def test_the_bucket_is_private_and_its_encryption_keys_outlive_the_stack(stack: Stack) -> None:
    inputs = stack("gcp").one(BUCKET).inputs
    assert inputs["uniformBucketLevelAccess"] is True
    assert inputs["publicAccessPrevention"] == "enforced"
    assert "encryption" not in inputs, "destroying a key of this stack would make kept checkpoints unreadable"


@pytest.mark.parametrize(("on_destroy", "kept"), [("keep", True), ("delete", False)])
def test_destroy_keeps_or_deletes_the_bucket_as_configured(stack: Stack, on_destroy: str, kept: bool) -> None:
    bucket = stack("gcp", {"storage.on_destroy": on_destroy}).one(BUCKET)
    assert bucket.retained is kept
    assert bucket.inputs["forceDestroy"] is not kept, "without it a bucket with objects is not deleted"


def test_old_versions_are_billed_for_three_days_instead_of_seven(stack: Stack) -> None:
    inputs = stack("gcp").one(BUCKET).inputs
    assert inputs["versioning"] == {"enabled": True}
    assert inputs["softDeletePolicy"] == {"retentionDurationSeconds": 0}
    (rule,) = [rule for rule in inputs["lifecycleRules"] if "daysSinceNoncurrentTime" in rule["condition"]]
    assert rule["action"] == {"type": "Delete"}
    assert rule["condition"] == {"daysSinceNoncurrentTime": 3, "withState": "ARCHIVED"}


def test_only_checkpoints_expire_and_only_if_configured(stack: Stack) -> None:
    def by_age(recording: Recording) -> list[Any]:
        """Return the conditions that delete objects by age."""
        rules = recording.one(BUCKET).inputs["lifecycleRules"]
        return [
            rule["condition"] for rule in rules if rule["action"]["type"] == "Delete" and "age" in rule["condition"]
        ]

    assert by_age(stack("gcp")) == []
    (condition,) = by_age(stack("gcp", {"storage.expire_checkpoints_after_days": 30}))
    assert condition == {"age": 30, "withState": "LIVE", "matchesPrefixes": ["checkpoints/"]}


def test_filestore_is_in_the_zone_of_the_gpu_nodes_and_mounted_by_its_csi_driver(stack: Stack) -> None:
    recording = stack("gcp")
    inputs = recording.one(FILESTORE).inputs
    assert (inputs["tier"], inputs["location"]) == ("ZONAL", "us-central1-a")
    assert inputs["fileShares"] == {"name": "datasets", "capacityGb": 1024}
    source = recording.one("kubernetes:core/v1:PersistentVolume").inputs["spec"]["csi"]
    assert source["driver"] == "filestore.csi.storage.gke.io"
    assert source["volumeHandle"] == "modeInstance/us-central1-a/gcp-storage-filestore-0a1b2c3/datasets"
    assert source["volumeAttributes"] == {"ip": "10.90.0.2", "volume": "datasets"}
