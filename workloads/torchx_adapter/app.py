"""Conversion between the manifest of an Indexed Job and TorchX's AppDef."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from torchx import specs

from infra.text import one_line
from workloads.errors import UserError
from workloads.facts import METRICS_PORT, RUN_LABEL
from workloads.objects.manifest import Manifest, hashed_name
from workloads.runs.diagnosis import GPU, parse_quantity
from workloads.runs.outputs import stack_outputs
from workloads.torchx_adapter import COMPONENT, SCHEDULER

ROLE = "trainer"
_ENTRYPOINT = "/app/trainer/entrypoint.sh"
_UNLIMITED = -1


def read_app(stack: str, facts: str) -> specs.AppDef:
    """Return the run of a stack, or of a file with the stack's output `job`."""
    if bool(stack) == bool(facts):
        raise UserError(f"the run needs one source: got --stack {stack!r} and --facts {facts!r}. Fix: pass one of them")
    job = stack_outputs(stack)["job"] if stack else _read_file(Path(facts))
    manifest = job.get("torchx") if isinstance(job, dict) else None
    if not manifest:
        launcher = job.get("launcher") if isinstance(job, dict) else None
        raise UserError(
            f"`pulumi up` starts the jobs of this launcher itself: got job.launcher {launcher!r}; allowed: torchx. "
            "Fix: pulumi config set --path job.launcher torchx, then pulumi up"
        )
    return to_app(manifest, stack)


def to_app(manifest: Manifest, stack: str = "") -> specs.AppDef:
    """Return a Job as an AppDef with one role; the role's metadata keeps what an AppDef has no field for."""
    spec = manifest["spec"]
    container = spec["template"]["spec"]["containers"][0]
    role = specs.Role(
        name=ROLE,
        image=container["image"],
        entrypoint=_ENTRYPOINT,
        args=list(container["args"]),
        env={item["name"]: item["value"] for item in container["env"]},
        num_replicas=spec["completions"],
        max_retries=spec["backoffLimitPerIndex"],
        retry_policy=specs.RetryPolicy.REPLICA,
        resource=_to_resource(container.get("resources") or {}),
        port_map={"metrics": METRICS_PORT},
        metadata={SCHEDULER: {"job": manifest, "stack": stack}},
    )
    return specs.AppDef(name=manifest["metadata"]["labels"][RUN_LABEL], roles=[role])


def to_job(app: specs.AppDef) -> Manifest:
    """Return the Job of an AppDef; a changed role gives it another name."""
    try:
        (role,) = app.roles
        original: Manifest = role.metadata[SCHEDULER]["job"]
    except (ValueError, KeyError):
        raise UserError(f"scheduler {SCHEDULER} runs one component: got {app.name!r}; allowed: {COMPONENT}") from None
    manifest = deepcopy(original)
    spec = manifest["spec"]
    container = spec["template"]["spec"]["containers"][0]
    container["image"], container["args"] = role.image, list(role.args)
    # TorchX adds variables of its session. The image does not use them, and they would change the job's name.
    env = {key: value for key, value in role.env.items() if not key.startswith("TORCHX_")}
    container["env"] = [{"name": key, "value": value} for key, value in sorted(env.items())]
    spec["completions"] = spec["parallelism"] = role.num_replicas
    spec["backoffLimitPerIndex"] = role.max_retries
    return manifest if manifest == original else _rename(manifest, app.name)


def _rename(manifest: Manifest, run: str) -> Manifest:
    """Give a Job the name for its content, also in the arguments of its container."""
    old = manifest["metadata"]["name"]
    new = hashed_name(run, manifest["spec"])
    container = manifest["spec"]["template"]["spec"]["containers"][0]
    container["args"] = [re.sub(re.escape(old), new, word) for word in container["args"]]
    manifest["metadata"]["name"] = new
    return manifest


def _to_resource(resources: Mapping[str, Mapping[str, str]]) -> specs.Resource:
    """Return the CPUs, GPUs and memory of one pod."""
    amounts = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
    memory = round(parse_quantity(amounts["memory"]) / 2**20) if "memory" in amounts else _UNLIMITED
    cpu = round(parse_quantity(amounts["cpu"])) if "cpu" in amounts else _UNLIMITED
    devices = {name: int(value) for name, value in amounts.items() if "/" in name and name != GPU}
    return specs.Resource(cpu=cpu, gpu=int(amounts.get(GPU, 0)), memMB=memory, devices=devices)


def _read_file(path: Path) -> Any:
    """Return the content of a JSON file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        fix = "pulumi stack output job --json --stack S > FILE"
        raise UserError(f"--facts {path} cannot be read: {one_line(error)}. Fix: {fix}") from None
