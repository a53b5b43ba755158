"""The command line: which command, its help, and how errors end. Imports torch only in the command that needs it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from trainer.errors import UserError
from trainer.exit_codes import EXIT_INTERRUPTED, EXIT_OK, EXIT_USER_ERROR

_TO_SPEAK_SECONDS = 10  # importing torch takes that long on a busy machine


def main(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit code: 0, 2 for a mistake of the user, 75 for "start me again", 130 for
    Ctrl-C."""
    rest = list(arguments)
    name = rest.pop(0) if rest and not rest[0].startswith("-") else "train"
    if name not in COMMANDS:
        return _fail(f"unknown command {name!r}; legal: {', '.join(COMMANDS)}")
    if "--help" in rest or "-h" in rest:
        from trainer.help import command_help, overview

        explicit = bool(arguments) and arguments[0] == name
        if explicit and name in _OWN_OPTIONS:
            _print(import_module(_OWN_OPTIONS[name]).parser().format_help().rstrip())
        else:
            _print(command_help(name, COMMANDS[name].__doc__ or "") if explicit else overview(COMMANDS))
        return EXIT_OK
    try:
        return COMMANDS[name](rest)
    except UserError as error:
        if not error.reported:
            return _fail(str(error))
        _leave_last()
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        if _is_main():
            _say(f"interrupted; the same command {_AFTER_AN_INTERRUPT.get(name, 'resumes from the last checkpoint')}")
        if os.environ.get("WORLD_SIZE", "1") != "1":
            sys.stdout.flush()
            os._exit(EXIT_INTERRUPTED)  # an orderly exit would abort: threads of the process group are still running
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `| head`: nobody reads any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK


def train_command(arguments: Sequence[str]) -> int:
    """Train, or go on with a run that has a checkpoint. In several processes: torchrun --nproc_per_node N -m trainer"""
    return _with_job(arguments, _train)


def evaluate_command(arguments: Sequence[str]) -> int:
    """Held-out loss, NE, AUC and calibration of a run's newest checkpoint (--train.run NAME)."""
    return _with_job(arguments, _evaluate)


def config_command(arguments: Sequence[str]) -> int:
    """Print the effective tree of options and its JSON Schema, as one JSON object."""
    from trainer.config import TrainConfig
    from trainer.config.options import load_config

    config = load_config(arguments, os.environ)
    _print(json.dumps({"config": config.model_dump(mode="json"), "schema": TrainConfig.model_json_schema()}, indent=2))
    return EXIT_OK


def launch_command(arguments: Sequence[str]) -> int:
    """Start N processes per machine (one per GPU, else 2), restart them, meet other machines: launch [--nproc N]
    [--max-restarts N] [--nnodes MIN:MAX --rdzv-endpoint HOST:PORT [--rdzv-id ID] [--rdzv-conf K=V,...]] [--service
    auto|vertex|azureml: as the training service's environment says] [--data-at FOLDER=WHERE] COMMAND ..."""
    from trainer.launch.launcher import launch

    return launch(list(arguments))


def export_command(arguments: Sequence[str]) -> int:
    """Write a run's newest checkpoint as a single-process model: export --out FOLDER [--quantize fp16|int8] [OPTION
    ...]"""
    from trainer.export.command import export_main

    return export_main(list(arguments), os.environ)


def predict_command(arguments: Sequence[str]) -> int:
    """Probabilities for a Parquet file: predict --model FOLDER --input x.parquet --output y.parquet [--batch-size N]"""
    from trainer.export.predict import predict_main

    return predict_main(list(arguments))


def bench_command(arguments: Sequence[str]) -> int:
    """Our step beside the stock TorchRec step, its profile or quality, sources, saves: bench [--profile | --quality |
    --data | --preprocess | --checkpoints] [OPTION ...]"""
    from trainer.bench import bench_main

    return bench_main(list(arguments), os.environ)


def plan_command(arguments: Sequence[str]) -> int:
    """Does the model fit, how fast can it be, what limits it: plan [--nodes N --gpus-per-node G --gpu NAME ...]"""
    from trainer.planning.plan import plan_main

    return plan_main(list(arguments), os.environ)


def report_command(arguments: Sequence[str]) -> int:
    """Draw loss and speed of a run with its kills, saves and resumes, as PNG and HTML: report RUN [--out FOLDER]"""
    from trainer.metrics.run_report import report_main

    return report_main(arguments)


def preprocess_command(arguments: Sequence[str]) -> int:
    """Criteo click logs (TSV, also .gz) to npy or Parquet files: preprocess --input PATH --output DIR [OPTION ...]"""
    from trainer.preprocess import preprocess_main

    return _alone("preprocess", preprocess_main, arguments)


def fetch_command(arguments: Sequence[str]) -> int:
    """Copy a folder from an object store to shared storage: fetch --from URI --to DIR [OPTION ...]"""
    from trainer.storage.fetch import fetch_main

    return _alone("fetch", fetch_main, arguments)


def netcheck_command(arguments: Sequence[str]) -> int:
    """Measure the bandwidth between the job's processes, fail below a minimum: netcheck [--min-gb-per-s X] [OPTION
    ...]"""
    from trainer.netcheck.command import netcheck_main

    return netcheck_main(list(arguments), os.environ)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": train_command,
    "evaluate": evaluate_command,
    "export": export_command,
    "predict": predict_command,
    "bench": bench_command,
    "plan": plan_command,
    "preprocess": preprocess_command,
    "fetch": fetch_command,
    "netcheck": netcheck_command,
    "config": config_command,
    "launch": launch_command,
    "report": report_command,
}


# Modules with a parser() of a command's own options; the other commands take those of the configuration.
_OWN_OPTIONS = {
    "preprocess": "trainer.preprocess.options",
    "fetch": "trainer.storage.fetch",
    "netcheck": "trainer.netcheck.command",
}
_AFTER_AN_INTERRUPT = {
    "preprocess": "goes on with what is not finished",
    "fetch": "goes on with the files that are missing",
    "netcheck": "measures anew",
    "bench": "measures anew",
}


def _alone(name: str, body: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """Run a command that has threads of its own instead of processes; raises UserError in a job of several."""
    processes = os.environ.get("WORLD_SIZE", "1")
    if processes != "1":
        error = UserError(
            f"{name} runs in one process with threads (--workers), but this job has {processes}; start it without a "
            f"launcher: python -m trainer {name} ..."
        )
        error.reported = not _is_main()
        raise error
    return body(arguments)


def _with_job(arguments: Sequence[str], body: Callable[[Any, Any], int]) -> int:
    """Load the configuration, start the processes' group, run `body(config, runtime)`, always end it; its exit
    code."""
    from trainer.config.options import load_config

    try:
        config = load_config(arguments, os.environ)
    except UserError as error:
        error.reported = not _is_main()  # every process sees the same mistake; one says it
        raise
    from trainer.runtime.quiet import quiet_libraries

    quiet_libraries()
    from trainer.runtime.process_group import init_runtime

    with init_runtime(config.train, dict(os.environ)) as runtime:
        code = body(config.for_processes(runtime.world_size), runtime)
    return code


def _train(config: Any, runtime: Any) -> int:
    from trainer.training.loop import train

    return train(config, runtime)


def _evaluate(config: Any, runtime: Any) -> int:
    from trainer.training.evaluation import evaluate_run

    evaluate_run(config, runtime)
    return EXIT_OK


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _leave_last() -> None:
    """Wait to be ended by the launcher, which ends all processes as soon as one has gone: were this the first, the one
    that says what is wrong might not come to say it."""
    if not _is_main():
        time.sleep(_TO_SPEAK_SECONDS)


def _fail(message: str) -> int:
    _say(f"error: {message}")
    return EXIT_USER_ERROR


def _say(message: str) -> None:
    sys.stderr.write(message + "\n")


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
