"""The Job that copies the dataset to the shared storage and preprocesses it; after a restart it resumes."""

from __future__ import annotations

from workloads.facts import Facts
from workloads.objects.manifest import AWAITED, NO_WAIT, Manifest, build_manifest, component_labels, hashed_name
from workloads.objects.pod import helper_pod

DATASET = "dataset"


def dataset_source(facts: Facts) -> str:
    """Return where the data is: the bucket's folder that `upload_data` fills, or the source from the settings.

    If the shared storage shows the bucket's folder, this is a path and nothing has to be copied.
    """
    source = facts.job.dataset.source
    assert source, "no dataset is configured"
    if source != "bucket":
        return source
    folder = facts.storage.bucket_folder
    return f"{facts.storage.mount_path.rstrip('/')}/{folder}" if folder else f"{facts.bucket_uri.rstrip('/')}/datasets"


def build(facts: Facts) -> Manifest:
    """Return the Job; its pod runs on nodes without GPUs, which are too expensive to idle during a copy."""
    settings = facts.job.dataset
    source, target = dataset_source(facts), f"{facts.storage.work_path}/{settings.name}"
    raw = source if source.startswith("/") else (f"{target}.raw" if settings.preprocess else target)
    memory = f"{round(settings.memory_gib * 1024)}Mi"
    resources = {
        "requests": {"cpu": f"{round(settings.cpus * 1000)}m", "memory": memory},
        "limits": {"memory": memory},
    }
    steps = []
    if raw != source:
        steps.append({"name": "fetch", "args": ["fetch", f"--from={source}", f"--to={raw}"], "resources": resources})
    if settings.preprocess:
        # Half of the container's memory: the interpreter, the page cache and the parser need the rest.
        limit = f"--memory-gib={settings.memory_gib / 2:g}"
        args = ["preprocess", f"--input={raw}", f"--output={target}", limit, *settings.options]
        steps.append({"name": "preprocess", "args": args, "resources": resources})
    *first, last = steps
    pod = helper_pod(facts, component=DATASET, containers=[last], first=first)
    pod["spec"]["restartPolicy"] = "OnFailure"
    spec = {"backoffLimit": facts.job.max_restarts, "template": pod}
    return build_manifest(
        facts,
        "batch/v1",
        "Job",
        hashed_name(DATASET, spec),
        {"spec": spec},
        labels=component_labels(facts, DATASET),
        annotations=AWAITED if settings.wait else NO_WAIT,
    )
