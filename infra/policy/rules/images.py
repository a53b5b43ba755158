"""Images by digest: a tag can be moved, and then a pod that starts again is another program."""

from __future__ import annotations

import re
from collections.abc import Iterable

from infra.policy.reading import UNKNOWN, Config, Resource, matches, resource_rule, strings
from infra.policy.rules.pods import OPERATORS, containers, is_workload, pod_specs

_DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")

_OPTIONS = {
    "exceptions": strings(
        "Images that may be named by tag, as shell patterns: the one that stack `local` loads into its nodes by hand, "
        "and TCPX's, which Google names by tag.",
        ["trainer:dev", "us-docker.pkg.dev/gce-ai-infra/gpudirect-tcpx/*"],
    ),
    "namespaces": strings("Namespaces of operators, whose releases are pinned by chart or commit.", OPERATORS),
}


def check(resource: Resource, config: Config) -> Iterable[str]:
    """Violations of one resource."""
    if not is_workload(resource, config):
        return
    for spec in pod_specs(resource.props):
        for container in containers(spec):
            image = container.get("image")
            # Not known in a preview where the image is built by the same `up`; that build gives a digest.
            if image is None or image is UNKNOWN or matches(str(image), config["exceptions"]):
                continue
            if not _DIGEST.search(str(image)):
                yield f"container {container.get('name')} runs {image}: name it by digest (...@sha256:...)"


POLICY = resource_rule("images-by-digest", "Images are named by digest.", check, _OPTIONS)
