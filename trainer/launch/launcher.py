"""Several processes on this machine, alone or together with other machines, by torch.distributed's own launcher; ended
by one line instead of its report."""

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
from trainer.launch.managed_service import OF_ONE_PROCESS, Machine, machine

if TYPE_CHECKING:
    from trainer.config import TrainConfig

_BEYOND_GRACE_SECONDS = 5  # a process ends itself when its grace is over; only one that cannot even do that is killed

#: Kubeflow's operators tell torchrun by its own variables how many machines there are and where they meet.
_OPERATOR_DECIDES = "PET_NNODES"

#: The training operator calls an elastic job successful when the first of its pods is, and deletes those that still
#: run: with rank 0 among them, the log with the result was gone. A kubelet takes a second or two to report an end.
_RANK_0_ENDS_BEFORE_SECONDS = 5.0


@dataclass(frozen=True)
class LaunchOptions:
    """How many processes, and what is done when some end.

    `service` is the training service whose environment says which machine this is; `data_at` is `FOLDER=WHERE`, for
    data that the settings call FOLDER/... and this machine finds elsewhere.
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
    """`launch [OPTION ...] COMMAND ...`: run the trainer's COMMAND in N processes per machine; returns the first
    failure's exit code, 75 after SIGTERM."""
    options, arguments = _split(arguments)
    arguments = _where_data_is(options.data_at, arguments)
    here = machine(options.service, os.environ)
    if here:
        options = _as_told(here, options, arguments)
    shutdown = ["--shutdown_timeout", str(_grace_seconds(arguments) + _BEYOND_GRACE_SECONDS)]
    if _OPERATOR_DECIDES in os.environ:
        return _run([*_beside_operator(options), *shutdown, "-m", "trainer", *arguments])
    count = process_count(options.nproc)
    elastic = _elastic_arguments(options)
    if count == 1 and not elastic:
        os.execv(sys.executable, [sys.executable, "-m", "trainer", *arguments])  # noqa: S606  # our own interpreter
    where = [*(elastic or ["--standalone"]), "--max_restarts", options.max_restarts]
    return _run([*where, "--nproc_per_node", str(count), *shutdown, "-m", "trainer", *arguments])


def _beside_operator(options: LaunchOptions) -> list[str]:
    """What is left to say where an operator has set torchrun's own variables (`PET_NNODES`, `PET_RDZV_ID` ...)."""
    given = {
        "--nproc": options.nproc != "auto",
        "--nnodes": options.nnodes != "1",
        "--rdzv-endpoint": options.rdzv_endpoint,
    }
    for option, is_given in given.items():
        if is_given:
            raise UserError(f"{option} is given, but {_OPERATOR_DECIDES} is set and decides: leave one of them out")
    return ["--max_restarts", options.max_restarts] if options.max_restarts != "0" else []


def _as_told(here: Machine, options: LaunchOptions, arguments: list[str]) -> LaunchOptions:
    """torchrun's options on a machine of a training service, whose folders are taken if the settings name none."""
    for option, is_given in {"--nnodes": options.nnodes != "1", "--rdzv-endpoint": options.rdzv_endpoint}.items():
        if is_given:
            raise UserError(f"{option} is given, but --service {options.service} decides: leave one of them out")
    for name in OF_ONE_PROCESS:
        os.environ.pop(name, None)
    config = _configured(arguments)
    uri = here.checkpoint_uri(config.train.run)
    if uri and "uri" not in config.checkpoint.model_fields_set:
        os.environ["TRAINER_CHECKPOINT__URI"] = uri
    if "dir" not in config.metrics.model_fields_set and (logs := _writable(here.logs)):
        os.environ["TRAINER_METRICS__DIR"] = logs
    if here.count == 1:
        return options
    own = f",{options.rdzv_conf}" if options.rdzv_conf else ""
    return replace(options, nnodes=str(here.count), rdzv_endpoint=here.first, rdzv_conf=here.rendezvous + own)


def _writable(folder: str | None) -> str | None:
    """The folder for logs, made; None where this user may not write there, which must not stop a training."""
    if folder is None:
        return None
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
        reason = "not writable"
    except OSError as error:
        reason = str(error)
    sys.stderr.write(f"warning: logs stay on this machine, the service's folder {folder} cannot be used ({reason})\n")
    return None


def _where_data_is(data_at: str, arguments: list[str]) -> list[str]:
    """The arguments with `data.path` and `data.eval_path` below FOLDER led to WHERE; raises UserError on another form.

    What comes last on the command line wins.
    """
    if not data_at:
        return arguments
    folder, equals, where = data_at.partition("=")
    if not (equals and folder.startswith("/") and where):
        raise UserError(f"--data-at is {data_at!r}; legal: FOLDER=WHERE, for example /data=/gcs/bucket/datasets")
    data = _configured(arguments).data
    led = list(arguments)
    for option, path in (("--data.path", data.path), ("--data.eval-path", data.eval_path)):
        if path and f"{path}/".startswith(folder.rstrip("/") + "/"):
            led += [option, where.rstrip("/") + path[len(folder.rstrip("/")) :]]
    return led


def _split(arguments: list[str]) -> tuple[LaunchOptions, list[str]]:
    """The launcher's own options, which come before COMMAND, and the rest."""
    names = {f"--{field.name.replace('_', '-')}": field.name for field in fields(LaunchOptions)}
    found: dict[str, str] = {}
    rest = list(arguments)
    while rest and rest[0].partition("=")[0].replace("_", "-") in names:
        option, equals, value = rest.pop(0).partition("=")
        if not equals:
            if not rest:
                raise UserError(f"option {option} lacks a value; see `python -m trainer launch --help`")
            value = rest.pop(0)
        found[names[option.replace("_", "-")]] = value
    return LaunchOptions(**found), rest


def process_count(wanted: str) -> int:
    """The processes of this machine that --nproc asks for. Raises UserError for what is no number of them."""
    if wanted == "auto":
        import torch

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return gpus or 2
    if not wanted.isdigit() or int(wanted) < 1:
        raise UserError(f"--nproc is {wanted!r}; legal: auto (one process per GPU, else 2), or a number of processes")
    return int(wanted)


def _elastic_arguments(options: LaunchOptions) -> list[str]:
    """torchrun's options for a job that restarts or spans machines; none for one that does neither."""
    least, _, most = options.nnodes.partition(":")
    if not least.isdigit() or not (most or least).isdigit() or not 1 <= int(least) <= int(most or least):
        raise UserError(f"--nnodes is {options.nnodes!r}; legal: a number of machines, or MIN:MAX, for example 1:2")
    if not options.max_restarts.isdigit():
        raise UserError(f"--max-restarts is {options.max_restarts!r}; legal: 0 or more")
    if int(most or least) == 1:
        return ["--standalone"] if int(options.max_restarts) else []
    if not options.rdzv_endpoint:
        raise UserError(
            f"--nnodes is {options.nnodes} but --rdzv-endpoint is missing: give HOST:PORT of one of the machines, the "
            f"same on all of them"
        )
    conf = ["--rdzv_conf", options.rdzv_conf] if options.rdzv_conf else []
    meeting = ["--rdzv_backend", "c10d", "--rdzv_endpoint", options.rdzv_endpoint, "--rdzv_id", options.rdzv_id]
    return ["--nnodes", options.nnodes, *meeting, *conf]


def _grace_seconds(arguments: list[str]) -> int:
    """fault.grace_seconds of the job to be: its processes must not be killed in the middle of their last save."""
    from trainer.config import FaultConfig

    command = arguments[0] if arguments and not arguments[0].startswith("-") else "train"
    if command != "train" or "--help" in arguments or "-h" in arguments:
        return FaultConfig().grace_seconds
    return _configured(arguments).fault.grace_seconds


def _configured(arguments: list[str]) -> TrainConfig:
    """The settings that a command (`train`, unless it is named) is about to run with."""
    from trainer.config.options import load_config

    named = bool(arguments) and not arguments[0].startswith("-")
    return load_config(arguments[1:] if named else arguments, os.environ)


def _run(options: list[str]) -> int:
    # The trainer sets its threads itself; without this the launcher explains at length that it chose 1.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # With a shared store a machine that comes back waits for an address that nobody publishes any more, and the whole
    # job fails after a minute (pytorch#135712).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    # Then rank 0 holds the store, and whoever asks it while the job ends gets a C++ stack on the console for an error
    # that is handled.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    # A failed worker has said what was wrong on its own standard error; the agent's summary adds nothing. Some of its
    # loggers have a level of their own, so their parent's is not enough.
    for name in [n for n in logging.root.manager.loggerDict if n.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    _mind_exit_codes()
    try:
        run(get_args_parser().parse_args(options))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:  # the workers have got the signal too, and one of them has said what that means
        return EXIT_RESTART if error.sigval == signal.SIGTERM else 128 + int(error.sigval)
    return EXIT_OK


def _mind_exit_codes() -> None:
    """Teach torchrun's agent three things: a user's mistake is not mended by a restart, a second SIGTERM means now, and
    where an operator watches, the machine of rank 0 ends first.

    torchrun has no hook for them, but one place in which it names its agent's class.
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
            if _OPERATOR_DECIDES in os.environ and self._worker_group.group_rank != 0:
                time.sleep(_RANK_0_ENDS_BEFORE_SECONDS)

    api.LocalElasticAgent = Agent  # type: ignore[misc]
