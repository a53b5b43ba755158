"""Start a job's processes on this machine with torchrun, alone or together with other machines."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.errors import UserError
from trainer.exit_codes import EXIT_OK, EXIT_RESTART, EXIT_USER_ERROR
from trainer.launch.managed_service import PROCESS_VARIABLES, Machine, find_machine

if TYPE_CHECKING:
    from trainer.config import TrainConfig

_KILL_AFTER_GRACE_SECONDS = 5  # a process exits when its grace period is over; one that hangs is killed

#: Kubeflow's operators set torchrun's own variables: the number of machines and the rendezvous.
_OPERATOR_VARIABLE = "PET_NNODES"

#: The training operator marks an elastic job as succeeded when its first pod succeeds, and deletes the pods that still
#: run. If rank 0 is one of them, the log with the result is lost. A kubelet reports an exit after a second or two.
_RANK_0_EXITS_EARLIER_SECONDS = 5.0


@dataclass(frozen=True)
class LaunchOptions:
    """Options of the launcher itself: the number of processes, restarts and the rendezvous.

    `service` is the managed training service that describes this machine in its environment. `data_at` is
    `FOLDER=PATH`: data below FOLDER in the configuration is below PATH on this machine.
    """

    service: str = "none"
    data_at: str = ""
    nproc: str = "auto"
    nnodes: str = "1"
    max_restarts: str = "0"
    rdzv_endpoint: str = ""
    rdzv_id: str = "trainer"
    rdzv_conf: str = ""


def launch(arguments: list[str]) -> int:
    """Run `launch [OPTION ...] COMMAND ...` in N processes per machine.

    Return the exit code of the first failure, or EXIT_RESTART after SIGTERM.
    """
    options, arguments = _split(arguments)
    arguments = redirect_data(options.data_at, arguments)
    machine = find_machine(options.service, os.environ)
    if machine:
        options = apply_service(machine, options, arguments)
    shutdown = ["--shutdown_timeout", str(_grace_seconds(arguments) + _KILL_AFTER_GRACE_SECONDS)]
    if _OPERATOR_VARIABLE in os.environ:
        return _run([*_operator_arguments(options), *shutdown, "-m", "trainer", *arguments])
    count = process_count(options.nproc)
    elastic = _elastic_arguments(options)
    if count == 1 and not elastic:
        os.execv(sys.executable, [sys.executable, "-m", "trainer", *arguments])  # noqa: S606  # our own interpreter
    rendezvous = [*(elastic or ["--standalone"]), "--max_restarts", options.max_restarts]
    return _run([*rendezvous, "--nproc_per_node", str(count), *shutdown, "-m", "trainer", *arguments])


def _operator_arguments(options: LaunchOptions) -> list[str]:
    """Return torchrun's options for a pod of an operator, which sets all others (`PET_NNODES`, `PET_RDZV_ID` ...)."""
    given = {
        "--nproc": options.nproc != "auto",
        "--nnodes": options.nnodes != "1",
        "--rdzv-endpoint": options.rdzv_endpoint,
    }
    for option, is_given in given.items():
        if is_given:
            raise UserError(f"{option} conflicts with the variable {_OPERATOR_VARIABLE}. Fix: remove one of them")
    return ["--max_restarts", options.max_restarts] if options.max_restarts != "0" else []


def apply_service(machine: Machine, options: LaunchOptions, arguments: list[str]) -> LaunchOptions:
    """Return the options for a machine of a managed training service.

    The service's folders for checkpoints and logs become the defaults of the configuration.
    """
    for option, is_given in {"--nnodes": options.nnodes != "1", "--rdzv-endpoint": options.rdzv_endpoint}.items():
        if is_given:
            raise UserError(f"{option} conflicts with --service {options.service}. Fix: remove one of them")
    for name in PROCESS_VARIABLES:
        os.environ.pop(name, None)
    config = _load_config(arguments)
    uri = machine.checkpoint_uri(config.train.run)
    if uri and "uri" not in config.checkpoint.model_fields_set:
        os.environ["TRAINER_CHECKPOINT__URI"] = uri
    if "dir" not in config.metrics.model_fields_set and (logs := _writable_folder(machine.logs)):
        os.environ["TRAINER_METRICS__DIR"] = logs
    if machine.count == 1:
        return options
    more = f",{options.rdzv_conf}" if options.rdzv_conf else ""
    return replace(
        options, nnodes=str(machine.count), rdzv_endpoint=machine.first, rdzv_conf=machine.rendezvous_config + more
    )


def _writable_folder(folder: str | None) -> str | None:
    """Create the folder for logs and return it; warn and return None if it is not writable."""
    if folder is None:
        return None
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
        reason = "not writable"
    except OSError as error:
        reason = str(error)
    sys.stderr.write(f"warning: logs stay on this machine: the service's folder {folder} cannot be used ({reason})\n")
    return None


def redirect_data(data_at: str, arguments: list[str]) -> list[str]:
    """Return the arguments, with paths of data below FOLDER replaced by paths below PATH.

    The new values are appended, because the last option on the command line wins.
    """
    if not data_at:
        return arguments
    folder, equals, target = data_at.partition("=")
    if not (equals and folder.startswith("/") and target):
        raise UserError(f"wrong --data-at: got {data_at!r}; allowed: FOLDER=PATH, such as /data=/gcs/bucket/datasets")
    data = _load_config(arguments).data
    redirected = list(arguments)
    for option, path in (("--data.path", data.path), ("--data.eval-path", data.eval_path)):
        if path and f"{path}/".startswith(folder.rstrip("/") + "/"):
            redirected += [option, target.rstrip("/") + path[len(folder.rstrip("/")) :]]
    return redirected


def _split(arguments: list[str]) -> tuple[LaunchOptions, list[str]]:
    """Split the arguments into the launcher's options, which come first, and the command with its own."""
    names = {f"--{field.name.replace('_', '-')}": field.name for field in fields(LaunchOptions)}
    found: dict[str, str] = {}
    rest = list(arguments)
    while rest and rest[0].partition("=")[0].replace("_", "-") in names:
        option, equals, value = rest.pop(0).partition("=")
        if not equals:
            if not rest:
                raise UserError(f"option {option} needs a value. Fix: see `python -m trainer launch --help`")
            value = rest.pop(0)
        found[names[option.replace("_", "-")]] = value
    return LaunchOptions(**found), rest


def process_count(nproc: str) -> int:
    """Return the number of processes on this machine for a value of --nproc; raise UserError if it is invalid."""
    if nproc == "auto":
        import torch

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return gpus or 2
    if not nproc.isdigit() or int(nproc) < 1:
        raise UserError(f"wrong --nproc: got {nproc!r}; allowed: auto (one process per GPU, else 2), or 1 or more")
    return int(nproc)


def _elastic_arguments(options: LaunchOptions) -> list[str]:
    """Return torchrun's options for a job that restarts or spans machines; return none for other jobs."""
    least, _, most = options.nnodes.partition(":")
    if not least.isdigit() or not (most or least).isdigit() or not 1 <= int(least) <= int(most or least):
        raise UserError(
            f"wrong --nnodes: got {options.nnodes!r}; allowed: a number of machines, or MIN:MAX, such as 1:2"
        )
    if not options.max_restarts.isdigit():
        raise UserError(f"wrong --max-restarts: got {options.max_restarts!r}; allowed: 0 or more")
    if int(most or least) == 1:
        return ["--standalone"] if int(options.max_restarts) else []
    if not options.rdzv_endpoint:
        raise UserError(
            f"--rdzv-endpoint is missing: --nnodes {options.nnodes} needs it. "
            f"Fix: set it to HOST:PORT of one machine, the same on all machines"
        )
    conf = ["--rdzv_conf", options.rdzv_conf] if options.rdzv_conf else []
    rendezvous = ["--rdzv_backend", "c10d", "--rdzv_endpoint", options.rdzv_endpoint, "--rdzv_id", options.rdzv_id]
    return ["--nnodes", options.nnodes, *rendezvous, *conf]


def _grace_seconds(arguments: list[str]) -> int:
    """Return fault.grace_seconds of the job, so that the launcher does not kill its processes during the last save."""
    from trainer.config import FaultConfig

    command = arguments[0] if arguments and not arguments[0].startswith("-") else "train"
    if command != "train" or "--help" in arguments or "-h" in arguments:
        return FaultConfig().grace_seconds
    return _load_config(arguments).fault.grace_seconds


def _load_config(arguments: list[str]) -> TrainConfig:
    """Return the configuration of the command that the arguments start (`train` if they name none)."""
    from trainer.config.options import load_config

    named = bool(arguments) and not arguments[0].startswith("-")
    return load_config(arguments[1:] if named else arguments, os.environ)


def _run(options: list[str]) -> int:
    """Run torchrun in this process and return the exit code of the job."""
    # The trainer sets its own threads; without this torchrun logs a long warning about its default of 1.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # With a shared store a machine that rejoins waits for an address that is no longer published, and the whole job
    # fails after a minute (pytorch#135712).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    # Rank 0 then hosts the store. A process that uses it while the job ends prints a C++ stack for a handled error.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    # A failed worker prints its error itself, so the agent's summary adds nothing. Some of the agent's loggers set
    # their own level, so changing their parent's is not enough.
    for name in [n for n in logging.root.manager.loggerDict if n.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    _install_agent()
    try:
        run(get_args_parser().parse_args(options))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:  # the workers got the signal too, and one of them has logged it
        return EXIT_RESTART if error.sigval == signal.SIGTERM else 128 + int(error.sigval)
    return EXIT_OK


def _install_agent() -> None:
    """Replace torchrun's agent by one that handles our exit codes.

    It does not restart after a user mistake, it kills at once on a second SIGTERM, and under an operator it lets the
    machine of rank 0 exit first. torchrun has no hook for these, but it looks up its agent's class in one place.
    """
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.launcher import api

    class Agent(LocalElasticAgent):
        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            result: RunResult = super()._monitor_workers(worker_group)
            if any(failure.exitcode == EXIT_USER_ERROR for failure in result.failures.values()):
                self._remaining_restarts = 0
            return result

        def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
            try:
                super()._shutdown(death_sig, timeout)
            except SignalException:
                super()._shutdown(signal.SIGKILL, timeout)
                raise

        def _exit_barrier(self) -> None:
            super()._exit_barrier()  # type: ignore[no-untyped-call]
            if _OPERATOR_VARIABLE in os.environ and self._worker_group.group_rank != 0:
                time.sleep(_RANK_0_EXITS_EARLIER_SECONDS)

    api.LocalElasticAgent = Agent  # type: ignore[misc]
