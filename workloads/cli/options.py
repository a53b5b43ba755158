"""Options that select a run: a stack, or a kubeconfig with a namespace and a name."""

from __future__ import annotations

import argparse
from dataclasses import replace

from infra.kube_api import KubeApi
from workloads.errors import UserError
from workloads.runs.outputs import stack_outputs
from workloads.runs.run import Run
from workloads.settings import SERVICES


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that select a run."""
    where = parser.add_argument_group("where the run is", "a stack, or a cluster, a namespace and a name")
    where.add_argument("--stack", metavar="S", help="Pulumi stack of the run")
    where.add_argument("--kubeconfig", metavar="FILE", help="kubeconfig of the cluster, instead of a stack")
    where.add_argument("--context", metavar="C", help="context in that file [its current context]")
    where.add_argument("--namespace", metavar="N", help="namespace of the run [with --stack: the stack's]")
    where.add_argument("--run", metavar="R", help="name of the run, job.run [with --stack: the stack's]")


def open_run(arguments: argparse.Namespace) -> Run:
    """Return the run that the options select; raise UserError if an option is missing."""
    if arguments.stack and arguments.kubeconfig:
        raise UserError("--stack and --kubeconfig exclude each other. Fix: pass one of them")
    if arguments.stack:
        return open_stack_run(arguments)
    if not arguments.kubeconfig:
        raise UserError("no run is selected. Fix: pass --stack S, or --kubeconfig FILE --namespace N --run R")
    if arguments.context == "":
        raise UserError("--context is empty. Fix: leave it out to use the file's current context")
    missing = [f"--{name}" for name in ("namespace", "run") if not getattr(arguments, name)]
    if missing:
        example = "--namespace training --run default"
        raise UserError(f"--kubeconfig needs {' and '.join(missing)}. Fix: pass, for example, {example}")
    context = f" --context {arguments.context}" if arguments.context else ""
    options = f"--kubeconfig {arguments.kubeconfig}{context} --namespace {arguments.namespace} --run {arguments.run}"
    api = KubeApi.from_file(arguments.kubeconfig, arguments.context)
    return Run(api, arguments.namespace, arguments.run, options=options)


def _find_fix(stack: str, kubeconfig: str) -> str:
    """Return what to do if the API server of a stack does not answer."""
    if "tls-server-name" in kubeconfig:
        return f"hold the tunnel open in another terminal: python -m infra tunnel --stack {stack}"
    return (
        f"log in to the cloud again, run `pulumi up --stack {stack}`, and check that network.authorized_cidrs contains "
        "this machine's address"
    )


def open_stack_run(arguments: argparse.Namespace) -> Run:
    """Return the run of a stack, or the run in the stack's namespace that `--run` names."""
    if arguments.context:
        raise UserError(f"--context needs --kubeconfig: got {arguments.context!r} with --stack. Fix: leave it out")
    stack = arguments.stack
    outputs = stack_outputs(stack)
    job = outputs["job"]
    if job["launcher"] in SERVICES:
        lines = "; ".join(f"{what}: `{line}`" for what, line in job["commands"].items())
        raise UserError(f"run {job['run']!r} is on {job['launcher']}, not on a cluster; {lines}; {job['page']}")
    kubeconfig = str(outputs.get("kubeconfig", ""))
    run = Run(
        KubeApi.from_text(kubeconfig, _find_fix(stack, kubeconfig)),
        arguments.namespace or job["namespace"],
        job["run"],
        job_kind=job["kind"],
        job_name=job["name"],
        nodes=job["nodes"],
        checkpoints=job["checkpoints"],
        start_command=f"pulumi up --stack {stack}",
        options=f"--stack {stack}",
    )
    if arguments.run in (None, "", run.name):
        return run
    other = replace(run, name=arguments.run, options=f"{run.options} --run {arguments.run}")
    return replace(other, job_kind=None, job_name=None, nodes=None, checkpoints=None)
