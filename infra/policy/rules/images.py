"""Rule images-by-digest: a tag can be moved, and then a restarted pod runs another program."""

from __future__ import annotations

import re
from collections.abc import Iterable

from infra.policy import facts
from infra.policy.rule import Config, resource_rule, strings
from infra.policy.rules.pods import OPERATORS, containers, is_workload, pod_specs
from infra.policy_facts import UNKNOWN, Resource, matches

_DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")

_OPTIONS = {
    "exceptions": strings(
        "Images that may be named by tag, as shell patterns.", facts.all_of(lambda cloud: cloud.images_by_tag)
    ),
    "namespaces": strings("Namespaces of operators, whose releases are pinned by chart or commit.", OPERATORS),
}


def check(resource: Resource, config: Config) -> Iterable[str]:
    """Yield the violations of one resource."""
    if not is_workload(resource, config):
        return
    for spec in pod_specs(resource.props):
        for container in containers(spec):
            image = container.get("image")
            # A preview does not know an image that the same `up` builds; the build names it by digest.
            if image is None or image is UNKNOWN or matches(str(image), config["exceptions"]):
                continue
            if not _DIGEST.search(str(image)):
                yield f"container {container.get('name')} runs {image}: name it by digest (...@sha256:...)"


POLICY = resource_rule("images-by-digest", "Images are named by digest.", check, _OPTIONS)
