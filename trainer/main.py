"""The command line: choose a command, print its help, turn errors into exit codes.

Only the commands that need torch import it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

from trainer.errors import UserError
from trainer.exit_codes import EXIT_INTERRUPTED, EXIT_OK, EXIT_USER_ERROR

_RANK_0_PRINTS_WITHIN_SECONDS = 10  # importing torch takes that long on a busy machine


def console() -> int:
    """Run the command in `sys.argv` and return its exit code."""
    return main(sys.argv[1:])


#: Packages that an environment for provisioning lacks.
_PACKAGES = {"torch", "torchrec", "fbgemm_gpu", "numpy", "pyarrow", "polars", "fsspec", "tensorboard", "matplotlib"}


def main(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code (see `trainer.exit_codes`)."""
    rest = list(arguments)
    name = rest.pop(0) if rest and not rest[0].startswith("-") else "train"
    if name not in COMMANDS:
        return _fail(f"unknown command: got {name!r}; allowed: {', '.join(COMMANDS)}")
    if "--help" in rest or "-h" in rest:
        _print(_help(name, explicit=bool(arguments) and arguments[0] == name))
        return EXIT_OK
    try:
        return COMMANDS[name](rest)
    except UserError as error:
        if not error.reported:
            return _fail(str(error))
        _exit_after_rank_0()
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        if _is_main():
            _warn(f"interrupted; the same command {_AFTER_INTERRUPT.get(name, 'resumes from the last checkpoint')}")
        if os.environ.get("WORLD_SIZE", "1") != "1":
            sys.stdout.flush()
            os._exit(EXIT_INTERRUPTED)  # an orderly exit would abort: threads of the process group are still running
        return EXIT_INTERRUPTED
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _PACKAGES:
            raise
        return _fail(
            f"the Python package {error.name!r} is missing. Fix: make install-trainer (on Linux; elsewhere the "
            f"container of trainer/Dockerfile)"
        )
    except BrokenPipeError:  # the reader closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK


def train_command(arguments: Sequence[str]) -> int:
    """Train a run, or resume it from its newest checkpoint.

    In several processes: torchrun --nproc_per_node N -m trainer
    """
    from trainer.config.options import load_config

    config = _load(lambda: load_config(arguments, os.environ))
    with _runtime(config.train) as runtime:
        from trainer.training.loop import train

        return train(config.for_processes(runtime.world_size), runtime)


def evaluate_command(arguments: Sequence[str]) -> int:
    """Print held-out loss, NE, AUC and calibration of a run's newest checkpoint (--train.run NAME)."""
    from trainer.config.options import load_section, merge_sources

    def find_sections() -> tuple[Any, Any]:
        tree = merge_sources(arguments, os.environ)  # the rest is complete only with the checkpoint's options
        return load_section(tree, "train"), load_section(tree, "checkpoint")

    train, checkpoint = _load(find_sections)
    with _runtime(train) as runtime:
        from trainer.training.evaluation import evaluate_run, load_evaluated_config

        config = load_evaluated_config(arguments, os.environ, checkpoint, train.run)
        evaluate_run(config.for_processes(runtime.world_size), runtime)
    return EXIT_OK


def config_command(arguments: Sequence[str]) -> int:
    """Print the effective options and their JSON Schema, as one JSON object."""
    from trainer.config import TrainConfig
    from trainer.config.options import load_config

    config = load_config(arguments, os.environ)
    _print(json.dumps({"config": config.model_dump(mode="json"), "schema": TrainConfig.model_json_schema()}, indent=2))
    return EXIT_OK


def launch_command(arguments: Sequence[str]) -> int:
    """Start N processes per machine (one per GPU, else 2) and restart them after failures.

    launch [--nproc N] [--max-restarts N] [--nnodes MIN:MAX --rdzv-endpoint HOST:PORT [--rdzv-id ID]
    [--rdzv-conf K=V,...]] [--service auto|vertex|azureml] [--data-at FOLDER=PATH] COMMAND ...

    --service takes the rendezvous from the environment of a managed training service. --data-at replaces the prefix
    FOLDER of data.path and data.eval-path by PATH.
    """
    from trainer.launch.launcher import launch

    return launch(list(arguments))


def export_command(arguments: Sequence[str]) -> int:
    """Write a run's newest checkpoint as a single-process model.

    export --out FOLDER [--quantize fp16|int8] [OPTION ...]
    """
    from trainer.export.command import export_main

    return export_main(list(arguments), os.environ)


def predict_command(arguments: Sequence[str]) -> int:
    """Write a probability for every row of Parquet files.

    predict --model FOLDER --input x.parquet --output y.parquet [--batch-size N]
    """
    from trainer.export.predict import predict_main

    return predict_main(list(arguments))


def bench_command(arguments: Sequence[str]) -> int:
    """Compare our training step with TorchRec's, or measure data, preprocessing and checkpoints.

    bench [--profile | --quality | --data | --preprocess | --checkpoints] [OPTION ...]
    """
    from trainer.bench import bench_main

    return bench_main(list(arguments), os.environ)


def plan_command(arguments: Sequence[str]) -> int:
    """Predict whether the model fits, how fast it trains and what limits it.

    plan [--nodes N --gpus-per-node G --gpu NAME ...]
    """
    from trainer.planning.command import plan_main

    return plan_main(list(arguments), os.environ)


def report_command(arguments: Sequence[str]) -> int:
    """Draw a run's loss, speed, kills, saves and resumes as PNG and HTML.

    report RUN [--out FOLDER]
    """
    from trainer.metrics.run_report import report_main

    return report_main(arguments)


def preprocess_command(arguments: Sequence[str]) -> int:
    """Convert Criteo click logs (TSV, also .gz) to npy or Parquet files.

    preprocess --input PATH --output DIR [OPTION ...]
    """
    from trainer.preprocess import preprocess_main

    return _run_alone("preprocess", preprocess_main, arguments)


def fetch_command(arguments: Sequence[str]) -> int:
    """Copy a folder from an object store to shared storage.

    fetch --from URI --to DIR [OPTION ...]
    """
    from trainer.storage.fetch import fetch_main

    return _run_alone("fetch", fetch_main, arguments)


def netcheck_command(arguments: Sequence[str]) -> int:
    """Measure the bandwidth between the job's processes; fail below a minimum.

    netcheck [--min-gb-per-s X] [OPTION ...]
    """
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
_AFTER_INTERRUPT = {
    "preprocess": "continues with the unfinished files",
    "fetch": "continues with the missing files",
    "netcheck": "starts again from the beginning",
    "bench": "starts again from the beginning",
}


def _help(name: str, *, explicit: bool) -> str:
    """Return the help of a command, or the overview if the user did not name a command."""
    from trainer.help import command_help, overview

    if not explicit:
        return overview(COMMANDS)
    if name in _OWN_OPTIONS:
        text: str = import_module(_OWN_OPTIONS[name]).parser().format_help()
        return text.rstrip()
    return command_help(name, COMMANDS[name].__doc__ or "")


def _run_alone(name: str, body: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """Run a command that has threads instead of processes; raise UserError in a job of several processes."""
    processes = os.environ.get("WORLD_SIZE", "1")
    if processes != "1":
        error = UserError(
            f"{name} runs in one process with threads (--workers): got {processes} processes; allowed: 1. "
            f"Fix: start it without a launcher, python -m trainer {name} ..."
        )
        error.reported = not _is_main()
        raise error
    return body(arguments)


def _load(read: Callable[[], Any]) -> Any:
    """Return what `read` loads from the options; every process finds the same mistake, and only rank 0 prints it."""
    try:
        return read()
    except UserError as error:
        error.reported = not _is_main()
        raise


def _runtime(config: Any) -> AbstractContextManager[Any]:
    """Return a context that starts and ends the process group with the options of section `train`."""
    from trainer.runtime.quiet import quiet_libraries

    quiet_libraries()
    from trainer.runtime.process_group import init_runtime

    return init_runtime(config, dict(os.environ))


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _exit_after_rank_0() -> None:
    """Wait until rank 0 has printed the error: the launcher ends all processes as soon as one exits."""
    if not _is_main():
        time.sleep(_RANK_0_PRINTS_WITHIN_SECONDS)


def _fail(message: str) -> int:
    _warn(f"error: {message}")
    return EXIT_USER_ERROR


def _warn(message: str) -> None:
    sys.stderr.write(message + "\n")


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
