"""A Job that brings the data onto the shared storage and prepares it; it goes on where it stopped when restarted."""

from __future__ import annotations

from workloads.facts import Facts
from workloads.objects.common import NO_WAIT, component_labels, manifest
from workloads.objects.names import Manifest, hashed
from workloads.objects.pod import helper_pod

DATASET = "dataset"


def source_of(facts: Facts) -> str:
    """Where the data is: the folder of the bucket that `upload_data` fills, or what the settings name.

    Where the shared storage shows that folder already, nothing has to be fetched.
    """
    source = facts.job.dataset.source
    assert source, "no dataset is configured"
    if source != "bucket":
        return source
    shown = facts.storage.bucket_folder
    return f"{facts.storage.mount_path.rstrip('/')}/{shown}" if shown else f"{facts.bucket_uri.rstrip('/')}/datasets"


def job(facts: Facts) -> Manifest:
    """Fetch, then preprocess, on any node that is not a GPU's: nobody pays for idle GPUs while files are copied."""
    wanted = facts.job.dataset
    source, target = source_of(facts), f"{facts.storage.work_path}/{wanted.name}"
    raw = source if source.startswith("/") else (f"{target}.raw" if wanted.preprocess else target)
    resources = {
        "requests": {"cpu": f"{round(wanted.cpus * 1000)}m", "memory": f"{round(wanted.memory_gib * 1024)}Mi"},
        "limits": {"memory": f"{round(wanted.memory_gib * 1024)}Mi"},
    }
    steps = []
    if raw != source:
        steps.append({"name": "fetch", "args": ["fetch", f"--from={source}", f"--to={raw}"], "resources": resources})
    if wanted.preprocess:
        # Half of the container's memory: the rest is the interpreter, the page cache and what a parser needs on top.
        memory = f"--memory-gib={wanted.memory_gib / 2:g}"
        args = ["preprocess", f"--input={raw}", f"--output={target}", memory, *wanted.options]
        steps.append({"name": "preprocess", "args": args, "resources": resources})
    *first, last = steps
    pod = helper_pod(facts, component=DATASET, containers=[last], first=first)
    pod["spec"]["restartPolicy"] = "OnFailure"
    spec = {"backoffLimit": facts.job.max_restarts, "template": pod}
    return manifest(
        facts,
        "batch/v1",
        "Job",
        hashed(DATASET, spec),
        {"spec": spec},
        labels=component_labels(facts, DATASET),
        annotations=None if wanted.wait else NO_WAIT,
    )
