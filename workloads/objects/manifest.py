"""Names, labels and metadata of the objects."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from workloads.facts import COMPONENT_LABEL, RUN_LABEL, Facts

Manifest = dict[str, Any]

#: The component label of a training's pods.
TRAINING = "training"
#: The annotation that keeps Pulumi from waiting until an object is ready, or a training has ended.
NO_WAIT = {"pulumi.com/skipAwait": "true"}
#: Pulumi waits for a Job and runs it again at the next `up` if it failed, instead of waiting for the failed one.
AWAITED = {"pulumi.com/replaceUnready": "true"}


def short_hash(value: object) -> str:
    """Return the first eight hexadecimal digits of the SHA-256 of a JSON value."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:8]


def hashed_name(base: str, content: Mapping[str, Any]) -> str:
    """Return `<base>-<hash of content>`, so that changed content creates a new object."""
    return f"{base}-{short_hash(content)}"


def training_labels(facts: Facts) -> dict[str, str]:
    """Return the labels of a run's pods and objects."""
    return {**facts.run_labels, COMPONENT_LABEL: TRAINING}


def component_labels(facts: Facts, component: str) -> dict[str, str]:
    """Return the labels of a companion, which serves all runs of the stack."""
    return {**facts.common_labels, COMPONENT_LABEL: component}


def pod_selector(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels that select pods; others, such as the owner, may change without replacing a service."""
    return {key: labels[key] for key in (RUN_LABEL, COMPONENT_LABEL) if key in labels}


def build_manifest(
    facts: Facts,
    api_version: str,
    kind: str,
    name: str,
    body: Mapping[str, Any],
    *,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    namespaced: bool = True,
) -> Manifest:
    """Return an object with the given labels, by default the stack's."""
    metadata: Manifest = {"name": name, "labels": dict(labels or facts.common_labels)}
    if namespaced:
        metadata["namespace"] = facts.namespace
    if annotations:
        metadata["annotations"] = dict(annotations)
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **body}
