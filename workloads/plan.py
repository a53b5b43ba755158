"""`python -m workloads plan`: predicts fit, speed and cost of a stack's model without provisioning anything."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from infra import catalog, stack_files
from infra.catalog import InstanceType
from infra.config.problems import fix_by_setting
from infra.text import one_line
from trainer.config import TrainConfig
from trainer.exit_codes import EXIT_OK
from workloads.errors import UserError
from workloads.facts import job_nodes
from workloads.settings import JobSettings

ROOT = Path(__file__).resolve().parents[1]
#: Between CPU nodes, which are not in the catalog: what small cloud instances have at least.
CPU_NETWORK_GBPS = 10.0
#: The training days of the Criteo 1TB click logs and their samples (torchrec.datasets.criteo).
CRITEO_DAYS, CRITEO_1TB_SAMPLES = 23, 4_195_197_692
ModelT = TypeVar("ModelT", bound=BaseModel)


@dataclass(frozen=True)
class PlanRequest:
    """A model and the nodes to plan it for; `instance` is None for CPU nodes, which are not in the catalog."""

    instance: InstanceType | None
    nodes: int
    processes_per_node: int
    trainer: TrainConfig
    spot: bool = False


def plan_command(arguments: argparse.Namespace) -> int:
    """Print the plan; raise UserError if the model does not fit."""
    request = read_request(arguments)
    try:
        plan = make_plan(request)
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] in ("workloads", "infra", "trainer"):
            raise
        raise _missing_package(str(error.name)) from None
    if arguments.json:
        sys.stdout.write(json.dumps(plan, indent=2) + "\n")
    else:
        _print_plan(plan)
    return EXIT_OK


def _missing_package(name: str) -> UserError:
    """Return the error for a package of the trainer that is not installed."""
    return UserError(
        f"the planner needs the trainer's Python package {name!r}. Fix: make install-trainer-cpu "
        "(on Linux; elsewhere the container of trainer/Dockerfile)"
    )


# --- the request -----------------------------------------------------------------------------------------------------


def read_request(arguments: argparse.Namespace) -> PlanRequest:
    """Return the stack's settings, overridden by the options; raise UserError for an invalid one."""
    if not arguments.stack and not (arguments.instance_type and arguments.nodes):
        fix = "pass --stack S, or --instance-type T --nodes N [--config FILE]"
        raise UserError(f"the plan needs a stack or an instance type. Fix: {fix}")
    values = read_stack(arguments.stack) if arguments.stack else {}
    job = _validate(JobSettings, "job", values.get("job") or {})
    trainer = _trainer_config(arguments.config, values.get("trainer") or {})
    gpu = values.get("gpu") or {}
    nodes = arguments.nodes or job_nodes(job, int(gpu["nodes"]["desired"]))
    cloud, name = arguments.cloud or values.get("cloud"), arguments.instance_type or gpu.get("instance_type")
    if name is None and cloud is not None and any(catalog.instances(cloud)):
        fix = fix_by_setting("gpu.instance_type", catalog.instances(cloud)[0].name)
        raise UserError(f"gpu.instance_type is missing. Fix: {fix}")
    own_cloud = cloud if not arguments.instance_type or arguments.cloud else None
    instance = find_instance(own_cloud, name) if name else None
    per_node = job.gpus_per_node or (instance.num_gpus if instance else job.processes_per_node or 1)
    if instance and per_node > instance.num_gpus:
        allowed = f"1 to {instance.num_gpus} on {instance.name}"
        raise UserError(f"job.gpus_per_node is too large: got {per_node}; allowed: {allowed}")
    return PlanRequest(instance, nodes, per_node, trainer, spot=gpu.get("capacity") == "spot")


def read_stack(stack: str, folder: Path = ROOT) -> dict[str, Any]:
    """Return the project's own keys of a stack: the values of its file and the defaults of Pulumi.yaml."""
    stacks = stack_files.list_stacks(folder)
    if stack not in stacks:
        allowed = ", ".join(stacks) or "none"
        raise UserError(f"no Pulumi.{stack}.yaml: got {stack!r}; allowed: {allowed}. Fix: pulumi stack init {stack}")
    try:
        return stack_files.read(stack, folder=folder).own_values()
    except ValueError as error:
        raise UserError(one_line(error)) from None


def find_instance(cloud: str | None, name: str) -> InstanceType:
    """Return the catalog's row of an instance type; without a cloud, of the only cloud that has it."""
    rows = [row for row in catalog.instances(cloud) if row.name == name]
    if len(rows) == 1:
        return rows[0]
    if rows:
        clouds = ", ".join(row.cloud for row in rows)
        raise UserError(f"several clouds have this instance type: got {name!r} of {clouds}. Fix: add --cloud")
    allowed = ", ".join(row.name for row in catalog.instances(cloud)) or "none"
    raise UserError(f"no such instance type{f' of {cloud}' if cloud else ''}: got {name!r}; allowed: {allowed}")


def _trainer_config(file: str | None, section: Mapping[str, Any]) -> TrainConfig:
    """Return the trainer's settings from a file, or from the stack's section."""
    if file is None:
        return _validate(TrainConfig, "trainer", section)
    path, parsers = Path(file), _parsers()
    if path.suffix.lower() not in parsers:
        raise UserError(f"--config {file} has an unknown ending: got {path.suffix!r}; allowed: {', '.join(parsers)}")
    try:
        values = parsers[path.suffix.lower()](path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--config {file} cannot be read: {one_line(error)}") from None
    return _validate(TrainConfig, f"--config {file}:", values or {})


def _parsers() -> dict[str, Callable[[str], Any]]:
    """Return the parser for each ending of a file."""
    import tomllib

    import yaml

    def parse_yaml(text: str) -> Any:
        """Parse YAML; raise ValueError on a mistake, as the other parsers do."""
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(one_line(error)) from None

    return {".json": json.loads, ".toml": tomllib.loads, ".yaml": parse_yaml, ".yml": parse_yaml}


def _validate(model: type[ModelT], name: str, values: Any) -> ModelT:
    """Return the section as its model; raise UserError with all mistakes in one line."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        mistakes = []
        for item in error.errors():
            key = ".".join(str(part) for part in item["loc"])
            got = "" if isinstance(item["input"], dict) else f": got {item['input']!r}"
            mistakes.append(f"{name}.{key}: {item['msg'].removeprefix('Value error, ')}{got}".replace(":.", ":"))
        raise UserError("; ".join(mistakes)) from None


# --- fit, speed, cost ------------------------------------------------------------------------------------------------


def make_plan(request: PlanRequest) -> dict[str, Any]:
    """Return the trainer's plan for the nodes, with their cost; raise UserError if the model does not fit."""
    plan = _plan_on_gpus(request, request.instance) if request.instance else _plan_on_cpus(request)
    return plan | {"cost": compute_costs(request, plan["samples_per_second"])}


def _plan_on_gpus(request: PlanRequest, instance: InstanceType) -> dict[str, Any]:
    """Return the plan for GPUs, which this machine need not have."""
    from trainer.planning.options import PlanOptions
    from trainer.planning.plan import predict_on_gpus

    options = PlanOptions(
        nodes=request.nodes,
        nproc=request.processes_per_node,
        gpus_per_node=request.processes_per_node,
        gpu=instance.gpu_model,
        hbm_gib=instance.hbm_gib_per_gpu,
        hbm_gb_per_second=instance.hbm_gb_per_second,
        nvlink_gb_per_second=instance.nvlink_gb_per_second,
        network_gbps=instance.network_gbps,
        host_memory_gib=instance.memory_gib,
    )
    try:
        plan = predict_on_gpus(request.trainer, options)
    except ValueError as error:  # the trainer's UserError is a ValueError
        raise UserError(f"{request.nodes} x {instance.name}: {error}") from None
    return plan | {"hardware": f"{request.nodes} x {instance.name} ({instance.num_gpus} {instance.gpu_model})"}


def _plan_on_cpus(request: PlanRequest) -> dict[str, Any]:
    """Return the plan for CPU nodes, measured on this machine's cores by the trainer's own command."""
    if find_spec("torchrec") is None:
        raise _missing_package("torchrec")
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(request.trainer.model_dump_json(exclude_defaults=True), encoding="utf-8")
        command = [sys.executable, "-m", "trainer", "plan", "--nproc", str(request.processes_per_node)]
        command += ["--nodes", str(request.nodes), "--network-gbps", f"{CPU_NETWORK_GBPS:g}", "--config", str(config)]
        sys.stderr.write("the pool has no GPUs: measuring this machine's cores for a few seconds\n")
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603  # our own
    if done.returncode:
        raise UserError(one_line(done.stderr.strip().rpartition("error: ")[2] or "the trainer's plan failed", 600))
    plan: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return plan


def compute_costs(request: PlanRequest, samples_per_second: float) -> dict[str, float | None]:
    """Return the cost in USD per hour, epoch and billion samples; None if the price or the length is unknown."""
    instance = request.instance
    on_demand = instance.on_demand_usd_per_hour if instance else None
    price = instance.spot_usd_per_hour if instance and request.spot else on_demand
    usd_per_hour = None if price is None else price * request.nodes
    samples = epoch_samples(request.trainer)

    def cost_of(count: float | None) -> float | None:
        """Return the cost of training on some samples."""
        return None if usd_per_hour is None or count is None else usd_per_hour * count / samples_per_second / 3600

    return {
        "usd_per_hour": usd_per_hour,
        "epoch_samples": samples,
        "epoch_hours": None if samples is None else samples / samples_per_second / 3600,
        "usd_per_epoch": cost_of(samples),
        "usd_per_billion_samples": cost_of(1e9),
    }


def epoch_samples(config: TrainConfig) -> int | None:
    """Return the samples of an epoch, None if only the files contain that number."""
    if config.data.source == "synthetic":
        return config.data.train_samples
    whole = config.data.source == "criteo" and config.model.num_embeddings == "criteo-1tb"
    return CRITEO_1TB_SAMPLES * len(config.data.criteo.train_days) // CRITEO_DAYS if whole else None


# --- the table -------------------------------------------------------------------------------------------------------


def _print_plan(plan: Mapping[str, Any]) -> None:
    """Print the plan as a table."""
    from rich.console import Console
    from rich.table import Table

    from trainer.planning.command import plan_rows

    table = Table(title="Plan", show_header=False)
    for name, value in [*plan_rows(plan), *_cost_rows(plan["cost"])]:
        table.add_row(name, value, style="bold" if name in ("predicted", "an epoch") else None)
    table.caption = "GPU nodes only; `pulumi stack output hourly_cost_usd` includes the rest of a stack that is up"
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _cost_rows(cost: Mapping[str, float | None]) -> list[tuple[str, str]]:
    """Return the rows of the table on cost."""
    hours, samples = cost["epoch_hours"], cost["epoch_samples"]
    length = f"{samples:,.0f} samples, {hours:,.2f} h, " if hours is not None else "of unknown length, "
    return [
        ("an hour", _format_usd(cost["usd_per_hour"])),
        ("an epoch", length + _format_usd(cost["usd_per_epoch"])),
        ("a billion samples", _format_usd(cost["usd_per_billion_samples"])),
    ]


def _format_usd(value: float | None) -> str:
    """Return an amount in USD."""
    return "price unknown" if value is None else f"{value:,.2f} USD"
