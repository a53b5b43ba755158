"""One stack and what can be done with it: preview, up, refresh, destroy, outputs."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pulumi import automation
from pulumi.automation.errors import CommandError, StackNotFoundError

from infra import stack_files as configuration
from infra.automation import account, diagnosis
from infra.automation.display import Display
from infra.automation.engine import Engine
from infra.automation.errors import CancelledError, OperationError
from infra.automation.outputs import StackOutputs, typed
from infra.automation.progress import Progress

Approve = Callable[["Changes"], bool]
AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True)
class Changes:
    """What an operation did, or will do: how many resources by action (`create`, `created` ...), and the time taken."""

    counts: Mapping[str, int]
    num_unchanged: int
    seconds: float

    def __bool__(self) -> bool:
        return bool(self.counts)


class LiveStack:
    """A stack of this project in the backend that `pulumi login` chose.

    `settings` are paths to values (`{"gpu.nodes.max": 4}`): a preview only tries them, `up` also keeps them in
    `Pulumi.<stack>.yaml`. Every failure is an OperationError whose text ends with what to do next.
    """

    def __init__(
        self,
        name: str,
        settings: Mapping[str, object] | None = None,
        *,
        folder: Path = configuration.ROOT,
        display: Display | None = None,
        policy_packs: Sequence[Path] = (),
        policy_configs: Sequence[Path] = (),
        secrets_provider: str | None = None,
    ) -> None:
        self.name, self.folder = name, folder
        self._settings, self._display = dict(settings or {}), display or Display()
        self._policies: dict[str, Any] = {}
        if policy_packs:
            self._policies["policy_packs"] = [str(path.resolve()) for path in policy_packs]
        if policy_configs:
            self._policies["policy_pack_configs"] = [str(path.resolve()) for path in policy_configs]
        self._engine = Engine(self._display.line)
        self._workspace = automation.LocalWorkspace(
            work_dir=str(folder), pulumi_command=self._engine, secrets_provider=secrets_provider
        )
        self._opened: automation.Stack | None = None

    def preview(self) -> Changes:
        """What `up` would change; nothing is, but a stack that has a file of settings and is new is made, empty."""
        self._check()
        stack = self._open("preview", create=True)
        with self._tried(stack) as config:
            return self._run("preview", stack.preview, config_file=config, **self._policies)

    def up(self, approve: Approve | None = None) -> StackOutputs:
        """Make the cloud what the settings say. `approve` sees the preview first and may say no."""
        self._check()
        stack = self._open("up", create=True)
        self._same_account("up", stack)
        with self._tried(stack) as config:
            if approve or config:
                planned = self._run("preview", stack.preview, config_file=config, **self._policies)
                if approve and not approve(planned):
                    raise CancelledError("nothing was changed")
            if config:
                Path(config).replace(self._file)
        self._run("up", stack.up, **self._policies)
        return self.outputs()

    def refresh(self) -> Changes:
        """Make the state what the cloud holds; the cloud is not changed."""
        stack = self._open("refresh")
        self._same_account("refresh", stack)
        for urn in self._ask("refresh", lambda: self._unfinished(stack)):
            self._display.line(f"warning: {urn} was being created when an update was cut off: look whether it exists")
        return self._run("refresh", stack.refresh, clear_pending_creates=True)

    def destroy(self) -> Changes:
        """Take everything away but what `storage.on_destroy keep` leaves; the stack and its settings stay."""
        stack = self._open("destroy")
        self._same_account("destroy", stack)
        there = self._ask("destroy", lambda: _resources(stack))
        kept = [item["urn"].rpartition("::")[2] for item in there if item.get("retainOnDelete")]
        changes = self._run("destroy", stack.destroy)
        if kept:
            self._display.line(f"kept, as storage.on_destroy says: {', '.join(kept)}")
        return changes

    def outputs(self) -> StackOutputs:
        """What the last `up` told."""
        stack = self._open("outputs")
        return typed(self.name, {key: output.value for key, output in self._ask("outputs", stack.outputs).items()})

    def outputs_if_up(self) -> StackOutputs | None:
        """The same; None for a stack of which nothing is there yet."""
        try:
            stack = self._open("outputs")
        except OperationError:
            known = [item.name for item in self._ask("outputs", self._workspace.list_stacks)]
            if self.name in known or self.name not in configuration.list_stacks(self.folder):
                raise
            return None
        found = self._ask("outputs", stack.outputs)
        return typed(self.name, {key: output.value for key, output in found.items()}) if found else None

    @property
    def _file(self) -> Path:
        return self.folder / f"Pulumi.{self.name}.yaml"

    def _check(self) -> None:
        """Mistakes in the settings are told before the engine starts, which takes seconds."""
        if self.name in configuration.list_stacks(self.folder):
            self._ask("preview", lambda: configuration.read(self.name, self._settings, self.folder).parse())

    def _open(self, verb: str, *, create: bool = False) -> automation.Stack:
        """The stack in the backend; with `create` one that only has a file of settings is made."""
        if self._opened is None:
            try:
                self._opened = self._ask(verb, lambda: automation.Stack.select(self.name, self._workspace))
            except _UnknownError:
                files = configuration.list_stacks(self.folder)
                if not create or self.name not in files:
                    known = [item.name for item in self._ask(verb, self._workspace.list_stacks)]
                    raise diagnosis.unknown(self.name, known, files) from None
                self._display.line(f"stack {self.name!r} is new here: making it")
                self._opened = self._ask(verb, lambda: automation.Stack.create(self.name, self._workspace))
        return self._opened

    @contextmanager
    def _tried(self, stack: automation.Stack) -> Iterator[str | None]:
        """A copy of the stack's file with the settings given here, None where none were; gone at the end."""
        if not self._settings:
            yield None
            return
        handle, name = tempfile.mkstemp(prefix=".Pulumi.", suffix=".yaml", dir=self.folder)
        os.close(handle)
        copy = Path(name)
        try:
            copy.write_bytes(self._file.read_bytes())
            copy.chmod(self._file.stat().st_mode)
            pairs = [word for key, value in self._settings.items() for word in ("--plaintext", f"{key}={_word(value)}")]
            command = ["config", "set-all", "--path", *pairs, "--config-file", name, "--stack", stack.name]
            self._ask("preview", lambda: self._engine.run(command, str(self.folder), {}))
            yield name
        finally:
            copy.unlink(missing_ok=True)

    def _same_account(self, verb: str, stack: automation.Stack) -> None:
        """Refuse to touch a stack with credentials of another account than the one it is in."""
        before = self._ask(verb, stack.outputs).get("account")
        if before is None:
            return
        config = self._ask(verb, stack.get_all_config)
        project = self._workspace.project_settings().name
        values = {key: str(item.value) for key, item in config.items()}
        configured = configuration.Configuration(project, self.name, values).parse_leniently()
        of_providers = {key: item for key, item in config.items() if not key.startswith(f"{project}:")}
        now = self._ask(verb, lambda: account.current(configured, of_providers, self._engine))
        if now != before.value:
            raise account.differs(self.name, verb, str(before.value), now, configured.cloud.login)

    def _run(self, verb: str, operation: Callable[..., object], **options: object) -> Changes:
        """One operation with its progress shown; what the engine itself prints is not."""
        progress = Progress(planning=verb == "preview", say=self._display.line)
        since = time.monotonic()
        before = self._engine.interrupts
        try:
            with self._display.following(f"{verb} of stack {self.name}", progress):
                operation(on_event=progress.event, color="never", suppress_progress=True, **options)
        except CommandError as error:
            attempt = diagnosis.Attempt(verb, self.name, self._left(verb))
            if self._engine.interrupts > before:
                raise _cancelled(attempt) from None
            raise diagnosis.explain(error, attempt, progress.complaints, progress.violations) from None
        if verb == "preview" and self._engine.interrupts > before:
            raise _cancelled(diagnosis.Attempt(verb, self.name))
        seconds = time.monotonic() - since
        self._display.line(progress.summary(seconds))
        return Changes(progress.counts, progress.num_unchanged, seconds)

    def _left(self, verb: str) -> str:
        """What the state holds after a failure, in words."""
        if verb == "preview" or self._opened is None:
            return ""
        try:
            resources, unfinished = _resources(self._opened), self._unfinished(self._opened)
        except CommandError:
            return "the state cannot be read at present"
        names = ", ".join(urn.rpartition("::")[2] for urn in unfinished)
        half = f", {len(unfinished)} half-made ({names}): python -m infra refresh --stack {self.name}" if names else ""
        return f"{len(resources)} resources in the state{half}"

    def _unfinished(self, stack: automation.Stack) -> list[str]:
        """URNs of resources whose creation was cut off."""
        pending = (stack.export_stack().deployment or {}).get("pending_operations") or []
        return [item["resource"]["urn"] for item in pending]

    def _ask(self, verb: str, question: Callable[[], AnswerT]) -> AnswerT:
        """A short command, its failure explained; after Ctrl-C what it was asked for is not begun."""
        before, attempt = self._engine.interrupts, diagnosis.Attempt(verb, self.name)
        try:
            answer = question()
        except StackNotFoundError:
            raise _UnknownError from None
        except CommandError as error:
            if self._engine.interrupts > before:
                raise _cancelled(attempt) from None
            raise diagnosis.explain(error, attempt, [], []) from None
        except ValueError as error:
            raise OperationError(str(error)) from None
        if self._engine.interrupts > before:
            raise _cancelled(attempt)
        return answer


class _UnknownError(Exception):
    """The backend has no such stack."""


def _resources(stack: automation.Stack) -> list[dict[str, Any]]:
    """Real resources of the state: neither the stack, nor components, nor providers."""
    found = (stack.export_stack().deployment or {}).get("resources") or []
    return [item for item in found if item.get("custom") and not item["type"].startswith("pulumi:providers:")]


def _cancelled(attempt: diagnosis.Attempt) -> CancelledError:
    left = f"; left: {attempt.left}" if attempt.left else "; nothing was changed"
    return CancelledError(f"{attempt.verb} of stack {attempt.stack!r} was cancelled{left}\n  to go on: {attempt.again}")


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
