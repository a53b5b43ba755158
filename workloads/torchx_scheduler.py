"""TorchX's scheduler for these clusters: an AppDef becomes the Indexed Job that it was made from.

The only module here that imports TorchX (0.7); `workloads/launchers/torchx.py` is what people name.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from infra.kube_api import KubeApi, KubeApiError, api_path
from infra.text import one_line
from workloads.cli import snapshot
from workloads.cli.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_USER_ERROR, CliError
from workloads.cli.logs import main_container
from workloads.cli.outputs import stack_outputs
from workloads.cli.target import Target
from workloads.cli.why import quantity
from workloads.facts import COMPONENT_LABEL, METRICS_PORT, PART_OF, RUN_LABEL
from workloads.launchers.torchx import SCHEDULER
from workloads.objects.names import Manifest, hashed

try:
    from torchx import schedulers, specs
    from torchx.schedulers.api import DescribeAppResponse, ListAppResponse, Scheduler, Stream, filter_regex
except ModuleNotFoundError as error:
    raise CliError(
        f"the Python package {error.name!r} is missing; `uv pip install torchx==0.7.0` installs it"
    ) from None

ROLE = "trainer"
_ENTRYPOINT = "/app/trainer/entrypoint.sh"
_STATES = {
    "running": specs.AppState.RUNNING,
    "waiting": specs.AppState.PENDING,
    "queued": specs.AppState.PENDING,
    "stopped": specs.AppState.PENDING,
    "succeeded": specs.AppState.SUCCEEDED,
    "failed": specs.AppState.FAILED,
}
_PHASES = {
    "Pending": specs.AppState.PENDING,
    "Running": specs.AppState.RUNNING,
    "Succeeded": specs.AppState.SUCCEEDED,
    "Failed": specs.AppState.FAILED,
}


# --- the component ---------------------------------------------------------------------------------------------------


def app_of(stack: str, facts: str) -> specs.AppDef:
    """The run of a stack, or of a file with the stack's output `job`, as TorchX describes programs."""
    if bool(stack) == bool(facts):
        raise CliError(f"--stack is {stack!r}, --facts {facts!r}; give one of them")
    job = stack_outputs(stack)["job"] if stack else _from_file(Path(facts))
    manifest = job.get("torchx") if isinstance(job, dict) else None
    if not manifest:
        launcher = job.get("launcher") if isinstance(job, dict) else None
        raise CliError(
            f"job.launcher is {launcher!r}, and `pulumi up` has started the job itself; to start it with TorchX: "
            "`pulumi config set --path job.launcher torchx`, then `pulumi up`"
        )
    return app_def(manifest, stack)


def app_def(manifest: Manifest, stack: str = "") -> specs.AppDef:
    """A Job's manifest as an AppDef of one role; what an AppDef has no word for stays in the role's metadata."""
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
        resource=_resource(container.get("resources") or {}),
        port_map={"metrics": METRICS_PORT},
        metadata={SCHEDULER: {"job": manifest, "stack": stack}},
    )
    return specs.AppDef(name=manifest["metadata"]["labels"][RUN_LABEL], roles=[role])


def _resource(resources: Mapping[str, Mapping[str, str]]) -> specs.Resource:
    """CPU, GPUs and memory of one pod; -1 is TorchX's word for what is not limited."""
    asked = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
    memory = round(quantity(asked["memory"]) / 2**20) if "memory" in asked else -1
    cpu = round(quantity(asked["cpu"])) if "cpu" in asked else -1
    devices = {name: int(value) for name, value in asked.items() if "/" in name and name != "nvidia.com/gpu"}
    return specs.Resource(cpu=cpu, gpu=int(asked.get("nvidia.com/gpu", 0)), memMB=memory, devices=devices)


def _from_file(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        how = "`pulumi stack output job --json --stack S > FILE` writes it"
        raise CliError(f"--facts {path}: {one_line(error)}; {how}") from None


# --- the scheduler ---------------------------------------------------------------------------------------------------


def create_scheduler(session_name: str, **_: object) -> IndexedJobScheduler:
    """What TorchX calls."""
    return IndexedJobScheduler(session_name)


class IndexedJobScheduler(Scheduler[Mapping[str, Any]]):
    """Submits, describes, lists, cancels and reads Indexed Jobs.

    An application is `<stack>:<namespace>:<job>`; without a stack the current context of $KUBECONFIG is asked.
    """

    def __init__(self, session_name: str) -> None:
        super().__init__(SCHEDULER, session_name)
        self._apis: dict[str, KubeApi] = {}

    def _submit_dryrun(self, app: specs.AppDef, cfg: Mapping[str, Any]) -> specs.AppDryRunInfo[Manifest]:
        """The Job, with what the role says now in place of what it was made from."""
        del cfg
        return specs.AppDryRunInfo(job_of(app), lambda manifest: json.dumps(manifest, indent=2))

    def schedule(self, dryrun_info: specs.AppDryRunInfo[Manifest]) -> str:
        """Create the Job. Raises CliError where it is there already."""
        app, manifest = dryrun_info._app, dryrun_info.request
        assert app is not None, "submit_dryrun keeps the AppDef"
        stack = app.roles[0].metadata[SCHEDULER]["stack"]
        name, namespace = manifest["metadata"]["name"], manifest["metadata"]["namespace"]
        app_id = f"{quote(stack, safe='')}:{namespace}:{name}"
        try:
            self._api(stack).create(api_path(namespace, "Job"), manifest)
        except KubeApiError as error:
            if error.status == HTTPStatus.CONFLICT:
                how = f"`torchx cancel {SCHEDULER}://{self.session_name}/{app_id}` removes it"
                raise CliError(f"job {name} is there already; {how}, a changed setting makes another") from None
            raise
        return app_id

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        """State of the Job and of each pod; None where there is no such Job."""
        stack, namespace, name = _parts(app_id)
        api = self._api(stack)
        job = api.find(api_path(namespace, "Job", name))
        if job is None:
            return None
        target = Target(api, namespace, str(job["metadata"]["labels"][RUN_LABEL]), kind="Job", name=name)
        shot = snapshot.take(target, with_metrics=False)
        replicas = [
            specs.ReplicaStatus(
                id=pod.index or 0,
                state=_PHASES.get(pod.phase, specs.AppState.UNKNOWN),
                role=ROLE,
                hostname=pod.node or "",
                structured_error_msg=pod.why or specs.NONE,
            )
            for pod in shot.pods
        ]
        container = job["spec"]["template"]["spec"]["containers"][0]
        return DescribeAppResponse(
            app_id=app_id,
            state=_STATES[shot.state],
            num_restarts=sum(pod.restarts for pod in shot.pods),
            msg=shot.why or next((pod.why for pod in shot.pods if pod.why), specs.NONE),
            roles_statuses=[specs.RoleStatus(ROLE, replicas)],
            roles=[specs.Role(ROLE, container["image"], num_replicas=int(job["spec"]["completions"]))],
        )

    def list(self) -> list[ListAppResponse]:
        """The training Jobs that these credentials show, of the stack in $PULUMI_STACK or of $KUBECONFIG."""
        stack = os.environ.get("PULUMI_STACK", "")
        part_of = ",".join(f"{key}={value}" for key, value in PART_OF.items())
        jobs = self._api(stack).items("/apis/batch/v1/jobs", labelSelector=f"{part_of},{COMPONENT_LABEL}=training")
        return [
            ListAppResponse(
                app_id=f"{quote(stack, safe='')}:{job['metadata']['namespace']}:{job['metadata']['name']}",
                state=_list_state(job),
            )
            for job in jobs
        ]

    def _cancel_existing(self, app_id: str) -> None:
        """Remove the Job; its pods get SIGTERM and save. Another `torchx run` goes on from there."""
        stack, namespace, name = _parts(app_id)
        self._api(stack).delete(api_path(namespace, "Job", name))

    def log_iter(
        self,
        app_id: str,
        role_name: str,
        k: int = 0,
        regex: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        should_tail: bool = False,
        streams: Stream | None = None,
    ) -> Iterable[str]:
        """Lines of the pod of index `k`; the newest, where it was replaced."""
        if streams not in (None, Stream.COMBINED) or until is not None:
            raise ValueError("Kubernetes keeps both streams of a container together and all of them; leave these out")
        stack, namespace, name = _parts(app_id)
        api = self._api(stack)
        pods = api.items(api_path(namespace, "Pod"), labelSelector=f"batch.kubernetes.io/job-name={name}")
        found = [pod for pod, _ in snapshot.newest_of_each(pods) if snapshot.index_of(pod) == k]
        if not found:
            raise CliError(f"{role_name}/{k} has no pod; {len(pods)} pods of {name} are there")
        query = {"container": main_container(found[0])} | ({"follow": "true"} if should_tail else {})
        if since is not None:
            query["sinceTime"] = since.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        path = f"{api_path(namespace, 'Pod', str(found[0]['metadata']['name']))}/log"
        lines = (f"{line}\n" for line in api.lines(path, **query))
        return filter_regex(regex, lines) if regex else lines

    def _api(self, stack: str) -> KubeApi:
        if stack not in self._apis:
            if stack:
                mend = f"log in to the cloud again, and run `pulumi up --stack {stack}`"
                self._apis[stack] = KubeApi.from_text(str(stack_outputs(stack).get("kubeconfig", "")), mend)
            else:
                default = Path.home() / ".kube" / "config"
                self._apis[stack] = KubeApi.from_file(os.environ.get("KUBECONFIG", str(default)), None)
        return self._apis[stack]


def job_of(app: specs.AppDef) -> Manifest:
    """The manifest that an AppDef of `dlrm` stands for. A changed role makes a Job of another name."""
    try:
        (role,) = app.roles
        original: Manifest = role.metadata[SCHEDULER]["job"]
    except (ValueError, KeyError):
        raise CliError(f"{SCHEDULER} runs workloads/launchers/torchx.py:dlrm alone, {app.name!r} is another") from None
    manifest = deepcopy(original)
    spec = manifest["spec"]
    container = spec["template"]["spec"]["containers"][0]
    container["image"], container["args"] = role.image, list(role.args)
    container["env"] = [{"name": key, "value": value} for key, value in sorted(role.env.items()) if not _of_torchx(key)]
    spec["completions"] = spec["parallelism"] = role.num_replicas
    spec["backoffLimitPerIndex"] = role.max_retries
    return manifest if manifest == original else _renamed(manifest, app.name)


def _of_torchx(variable: str) -> bool:
    """TorchX's runner adds the session's name; nothing in the image reads it, and it would rename the job."""
    return variable.startswith("TORCHX_")


def _renamed(manifest: Manifest, run: str) -> Manifest:
    """Under the name that belongs to its content, which the arguments of the container repeat."""
    old = manifest["metadata"]["name"]
    new = hashed(run, manifest["spec"])
    container = manifest["spec"]["template"]["spec"]["containers"][0]
    container["args"] = [re.sub(re.escape(old), new, word) for word in container["args"]]
    manifest["metadata"]["name"] = new
    return manifest


def _parts(app_id: str) -> tuple[str, str, str]:
    stack, _, rest = app_id.partition(":")
    namespace, colon, name = rest.partition(":")
    if not colon:
        raise CliError(f"{app_id!r} is no application of {SCHEDULER}; legal: STACK:NAMESPACE:JOB, as `list` shows them")
    return unquote(stack), namespace, name


def _list_state(job: Mapping[str, Any]) -> specs.AppState:
    """Without a look at its pods."""
    status = job.get("status") or {}
    true = {item["type"] for item in status.get("conditions") or () if item.get("status") == "True"}
    if "Complete" in true:
        return specs.AppState.SUCCEEDED
    if "Failed" in true:
        return specs.AppState.FAILED
    return specs.AppState.RUNNING if status.get("ready") else specs.AppState.PENDING


# --- the command line ------------------------------------------------------------------------------------------------


def register() -> None:
    """Add this scheduler to TorchX's own.

    Not as an entry point: once a package has one in the group `torchx.schedulers`, TorchX forgets its own schedulers.
    """
    modules: Any = schedulers.DEFAULT_SCHEDULER_MODULES
    modules[SCHEDULER] = __name__


def command_line(arguments: Sequence[str]) -> int:
    """TorchX's own command line with this scheduler; mistakes end with one line and exit code 2."""
    from torchx.cli.main import main

    register()
    try:
        main(list(arguments))
    except (CliError, KubeApiError) as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return EXIT_OK
