"""`python -m workloads plan`: would the stack's model fit its pool, how fast, for how much; nothing is provisioned."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from infra import catalog
from infra.catalog import InstanceType
from infra.config.problems import fix_by_setting
from infra.text import one_line
from trainer.config import TrainConfig
from workloads.cli.errors import EXIT_OK, CliError
from workloads.facts import job_nodes
from workloads.settings import JobSettings

ROOT = Path(__file__).resolve().parents[1]
PROJECT = "torchrec-cloud"
#: Between CPU nodes, which no catalog describes: what small cloud instances have at least.
CPU_NETWORK_GBPS = 10.0
#: The training days of the Criteo 1TB click logs and their samples (torchrec.datasets.criteo).
CRITEO_DAYS, CRITEO_1TB_SAMPLES = 23, 4_195_197_692
Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class Wanted:
    """What is planned: a model on nodes of a type; `instance` is None on CPU nodes, which have no catalog."""

    instance: InstanceType | None
    nodes: int
    processes_per_node: int
    trainer: TrainConfig
    spot: bool = False


def plan_command(arguments: argparse.Namespace) -> int:
    """0 where it fits; where it does not, one line says why, with exit code 2."""
    wanted = read(arguments)
    found = planned(wanted)
    if arguments.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        _show(found)
    return EXIT_OK


def read(arguments: argparse.Namespace) -> Wanted:
    """The stack's file, then the options over it. Raises CliError with the key and what is legal."""
    if not arguments.stack and not (arguments.instance_type and arguments.nodes):
        raise CliError("nothing to plan; give --stack S, or --instance-type T --nodes N [--config FILE]")
    keys = stack_keys(arguments.stack) if arguments.stack else {}
    job = _checked(JobSettings, "job", keys.get("job") or {})
    trainer = _trainer(arguments.config, keys.get("trainer") or {})
    gpu = keys.get("gpu") or {}
    nodes = arguments.nodes or job_nodes(job, int((gpu.get("nodes") or {}).get("desired", 2)))
    cloud, name = arguments.cloud or keys.get("cloud"), arguments.instance_type or gpu.get("instance_type")
    if name is None and cloud is not None and any(catalog.instances(cloud)):
        raise CliError(
            f"gpu.instance_type is missing; `{fix_by_setting('gpu.instance_type', catalog.instances(cloud)[0].name)}`"
        )
    instance = instance_of(cloud if not arguments.instance_type or arguments.cloud else None, name) if name else None
    per_node = job.gpus_per_node or (instance.num_gpus if instance else job.processes_per_node or 1)
    if instance and per_node > instance.num_gpus:
        raise CliError(f"job.gpus_per_node is {per_node}; {instance.name} has {instance.num_gpus}")
    return Wanted(instance, nodes, per_node, trainer, spot=gpu.get("capacity") == "spot")


def stack_keys(stack: str, folder: Path = ROOT) -> dict[str, Any]:
    """The project's own keys of `Pulumi.<stack>.yaml`, without the project's name."""
    import yaml

    path = folder / f"Pulumi.{stack}.yaml"
    if not path.is_file():
        there = sorted(found.name.split(".")[1] for found in folder.glob("Pulumi.*.yaml"))
        raise CliError(
            f"no {path.name}; there are the stacks {', '.join(there) or 'none'}; `pulumi stack init {stack}`"
        )
    try:
        config = (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get("config") or {}
    except (yaml.YAMLError, AttributeError, UnicodeDecodeError) as error:
        raise CliError(f"{path.name} is not YAML of a stack: {one_line(error)}") from None
    return {key.partition(":")[2]: value for key, value in config.items() if key.startswith(f"{PROJECT}:")}


def instance_of(cloud: str | None, name: str) -> InstanceType:
    """The catalog's row of a type; without a cloud the type's name finds it."""
    rows = [row for row in catalog.instances(cloud) if row.name == name]
    if len(rows) == 1:
        return rows[0]
    if rows:
        raise CliError(f"--instance-type {name} exists on {', '.join(row.cloud for row in rows)}; add --cloud")
    legal = ", ".join(row.name for row in catalog.instances(cloud)) or "none"
    raise CliError(f"no instance type {name!r}{f' of {cloud}' if cloud else ''} in the catalog; legal: {legal}")


def _trainer(file: str | None, section: Mapping[str, Any]) -> TrainConfig:
    """The stack's `trainer` section, or a file in its place."""
    if file is None:
        return _checked(TrainConfig, "trainer", section)
    path = Path(file)
    try:
        text = path.read_text(encoding="utf-8")
        tree = _parsers()[path.suffix.lower()](text)
    except KeyError:
        raise CliError(f"--config {file}: ends in {path.suffix!r}; legal: {', '.join(_parsers())}") from None
    except (OSError, ValueError) as error:
        raise CliError(f"--config {file}: {one_line(error)}") from None
    return _checked(TrainConfig, f"--config {file}:", tree or {})


def _parsers() -> dict[str, Any]:
    import tomllib

    import yaml

    def from_yaml(text: str) -> Any:
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(one_line(error)) from None

    return {".json": json.loads, ".toml": tomllib.loads, ".yaml": from_yaml, ".yml": from_yaml}


def _checked(model: type[Model], name: str, values: Any) -> Model:
    """The section, or one line with every mistake in it."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        told = []
        for item in error.errors():
            key = ".".join(str(part) for part in item["loc"])
            seen = "" if isinstance(item["input"], dict) else f" = {item['input']!r}"
            told.append(f"{name}.{key}{seen}: {item['msg'].removeprefix('Value error, ')}".replace(":.", ":"))
        raise CliError("; ".join(told)) from None


# --- fit, speed, cost ------------------------------------------------------------------------------------------------


def planned(wanted: Wanted) -> dict[str, Any]:
    """The trainer's plan for the pool, with what it costs. Raises CliError where the model does not fit."""
    found = _on_gpus(wanted, wanted.instance) if wanted.instance else _on_cpus(wanted)
    return found | {"cost": costs(wanted, found["samples_per_second"])}


def _on_gpus(wanted: Wanted, instance: InstanceType) -> dict[str, Any]:
    """On paper: no GPU is needed, but the planner is."""
    from trainer.planning.options import PlanOptions
    from trainer.planning.plan import predict_on_gpus

    options = PlanOptions(
        nodes=wanted.nodes,
        nproc=wanted.processes_per_node,
        gpus_per_node=wanted.processes_per_node,
        gpu=instance.gpu_model,
        hbm_gib=instance.hbm_gib_per_gpu,
        hbm_gb_per_second=instance.hbm_gb_per_second,
        nvlink_gb_per_second=instance.nvlink_gb_per_second,
        network_gbps=instance.network_gbps,
        host_memory_gib=instance.memory_gib,
    )
    try:
        found = predict_on_gpus(wanted.trainer, options)
    except ValueError as error:  # the trainer's errors for people are of this class
        raise CliError(f"{wanted.nodes} x {instance.name}: {error}") from None
    return found | {"hardware": f"{wanted.nodes} x {instance.name} ({instance.num_gpus} {instance.gpu_model})"}


def _on_cpus(wanted: Wanted) -> dict[str, Any]:
    """With this machine's cores in place of a node's, measured by the trainer's own command in as many processes."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(wanted.trainer.model_dump_json(exclude_defaults=True), encoding="utf-8")
        command = [sys.executable, "-m", "trainer", "plan", "--nproc", str(wanted.processes_per_node)]
        command += ["--nodes", str(wanted.nodes), "--network-gbps", f"{CPU_NETWORK_GBPS:g}", "--config", str(config)]
        sys.stderr.write("no GPUs in this pool: measuring this machine's cores for a few seconds\n")
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603  # our own
    if done.returncode:
        raise CliError(one_line(done.stderr.strip().rpartition("error: ")[2] or "the trainer's plan failed", 600))
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def costs(wanted: Wanted, samples_per_second: float) -> dict[str, float | None]:
    """USD of the nodes that train: an hour, an epoch, a billion samples; None where price or length is not known."""
    instance = wanted.instance
    on_demand = instance.on_demand_usd_per_hour if instance else None
    price = instance.spot_usd_per_hour if instance and wanted.spot else on_demand
    hour = None if price is None else price * wanted.nodes
    samples = epoch_samples(wanted.trainer)

    def of(count: float | None) -> float | None:
        return None if hour is None or count is None else hour * count / samples_per_second / 3600

    return {
        "usd_per_hour": hour,
        "epoch_samples": samples,
        "epoch_hours": None if samples is None else samples / samples_per_second / 3600,
        "usd_per_epoch": of(samples),
        "usd_per_billion_samples": of(1e9),
    }


def epoch_samples(config: TrainConfig) -> int | None:
    """Samples of an epoch where the settings tell it; files tell it only to who reads them."""
    if config.data.source == "synthetic":
        return config.data.train_samples
    whole = config.data.source == "criteo" and config.model.num_embeddings == "criteo-1tb"
    return CRITEO_1TB_SAMPLES * len(config.data.criteo.train_days) // CRITEO_DAYS if whole else None


def _show(found: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from trainer.planning.command import plan_rows

    cost = found["cost"]
    table = Table(title="Plan", show_header=False)
    for name, value in [*plan_rows(found), *_cost_rows(cost)]:
        table.add_row(name, value, style="bold" if name in ("predicted", "an epoch") else None)
    table.caption = "GPU nodes alone; `pulumi stack output hourly_cost_usd` counts the rest of a stack that is up"
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _cost_rows(cost: Mapping[str, float | None]) -> list[tuple[str, str]]:
    hours, samples = cost["epoch_hours"], cost["epoch_samples"]
    length = f"{samples:,.0f} samples, {hours:,.2f} h, " if hours is not None else "of unknown length, "
    return [
        ("an hour", _usd(cost["usd_per_hour"])),
        ("an epoch", length + _usd(cost["usd_per_epoch"])),
        ("a billion samples", _usd(cost["usd_per_billion_samples"])),
    ]


def _usd(value: float | None) -> str:
    return "price not known" if value is None else f"{value:,.2f} USD"
