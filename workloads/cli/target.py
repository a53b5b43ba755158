"""Which run, on which cluster: from a stack's outputs, or from a kubeconfig and two names."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from http import HTTPStatus

from infra.kube_api import KubeApi, KubeApiError, Object, api_path
from workloads.cli.errors import CliError
from workloads.cli.outputs import stack_outputs
from workloads.facts import COMPONENT_LABEL, RUN_LABEL
from workloads.settings import SERVICES

#: The kinds of a training job; an owner comes before what it owns.
KINDS = ("TrainJob", "PyTorchJob", "Job")
TRAINING = "training"


@dataclass(frozen=True)
class Target:
    """A run and its cluster. `kind` and `name` are None where nobody has said them: `job` looks for them."""

    api: KubeApi
    namespace: str
    run: str
    kind: str | None = None
    name: str | None = None
    nodes: int | None = None
    checkpoints: str | None = None
    again: str = "pulumi up"
    options: str = ""

    @property
    def selector(self) -> str:
        """What finds the pods of the run."""
        return f"{RUN_LABEL}={self.run},{COMPONENT_LABEL}={TRAINING}"

    def job(self) -> tuple[str, Object] | None:
        """Kind and object of the run's job: the one that the stack made, else the newest of the run."""
        if self.kind and self.name:
            found = self.api.find(api_path(self.namespace, self.kind, self.name))
            if found is not None:
                return self.kind, found
        refused: KubeApiError | None = None
        for kind in KINDS:
            try:
                jobs = self.api.items(api_path(self.namespace, kind), labelSelector=self.selector)
            except KubeApiError as error:
                if error.status != HTTPStatus.FORBIDDEN:  # role `view` shows Jobs, but not the operators' kinds
                    raise
                refused = refused or error
                continue
            if jobs:
                return kind, max(jobs, key=lambda item: str(item["metadata"].get("creationTimestamp", "")))
        if refused:
            raise refused
        return None

    def found_job(self) -> tuple[str, Object]:
        """The same; CliError where there is none."""
        found = self.job()
        if found is None:
            raise CliError(f"run {self.run!r} has no job in namespace {self.namespace!r}; `{self.again}` starts one")
        return found


def add_options(parser: argparse.ArgumentParser) -> None:
    """How every command is told where to look."""
    where = parser.add_argument_group("where the run is", "a stack, or a cluster and two names")
    where.add_argument("--stack", metavar="S", help="stack of Pulumi whose outputs say it")
    where.add_argument("--kubeconfig", metavar="FILE", help="kubeconfig of the cluster, without Pulumi")
    where.add_argument("--context", metavar="C", help="context of that file [its current one]")
    where.add_argument("--namespace", metavar="N", help="namespace of the run [with --stack: the stack's]")
    where.add_argument("--run", metavar="R", help="name of the run, job.run [with --stack: the stack's]")


def open_target(arguments: argparse.Namespace) -> Target:
    """The run that the options name; CliError says what is missing."""
    if arguments.stack and arguments.kubeconfig:
        raise CliError("--stack and --kubeconfig both say where the run is; give one of them")
    if arguments.stack:
        return from_stack(arguments)
    if not arguments.kubeconfig:
        raise CliError("nothing says where the run is; give --stack S, or --kubeconfig FILE --namespace N --run R")
    if arguments.context == "":
        raise CliError("--context is empty; leave it out for the file's current one")
    missing = [f"--{name}" for name in ("namespace", "run") if not getattr(arguments, name)]
    if missing:
        raise CliError(f"--kubeconfig needs {' and '.join(missing)}, for example --namespace training --run default")
    context = f" --context {arguments.context}" if arguments.context else ""
    options = f"--kubeconfig {arguments.kubeconfig}{context} --namespace {arguments.namespace} --run {arguments.run}"
    api = KubeApi.from_file(arguments.kubeconfig, arguments.context)
    return Target(api, arguments.namespace, arguments.run, options=options)


def from_stack(arguments: argparse.Namespace) -> Target:
    """The run of a stack, or another one that `--run` names in the stack's namespace."""
    if arguments.context:
        raise CliError(f"--context is {arguments.context!r}, but a stack has one cluster; it goes with --kubeconfig")
    stack = arguments.stack
    outputs = stack_outputs(stack)
    job = outputs["job"]
    if job["launcher"] in SERVICES:
        lines = "; ".join(f"{what}: `{line}`" for what, line in job["commands"].items())
        raise CliError(f"run {job['run']!r} is on {job['launcher']}, not on a cluster; {lines}; {job['page']}")
    mend = (
        f"log in to the cloud again, run `pulumi up --stack {stack}`, and check that network.authorized_cidrs lets "
        "this machine in"
    )
    target = Target(
        KubeApi.from_text(str(outputs.get("kubeconfig", "")), mend),
        arguments.namespace or job["namespace"],
        job["run"],
        kind=job["kind"],
        name=job["name"],
        nodes=job["nodes"],
        checkpoints=job["checkpoints"],
        again=f"pulumi up --stack {stack}",
        options=f"--stack {stack}",
    )
    if arguments.run and arguments.run != target.run:
        options = f"{target.options} --run {arguments.run}"
        return replace(target, run=arguments.run, kind=None, name=None, nodes=None, checkpoints=None, options=options)
    return target
