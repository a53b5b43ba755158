"""Operations on one stack: preview, up, refresh, destroy, outputs."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pulumi import automation
from pulumi.automation.errors import CommandError, StackNotFoundError

from infra import stack_files as configuration
from infra import tunnel
from infra.automation import account, diagnosis
from infra.automation.display import Display
from infra.automation.engine import Engine, require_environment
from infra.automation.errors import CancelledError, OperationError
from infra.automation.outputs import StackOutputs, parse_outputs
from infra.automation.progress import Progress
from infra.automation.state import State, custom_resources, read_state
from infra.findings.common_causes import CLUSTER, GENERAL
from infra.findings.model import Cause
from infra.stack import find_access_problems

Approve = Callable[["Changes"], bool]
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Changes:
    """The changes that an operation made or will make: resources by action (`create`, `created` ...), and its time."""

    counts: Mapping[str, int]
    num_unchanged: int
    seconds: float

    def __bool__(self) -> bool:
        """Return whether there is any change."""
        return bool(self.counts)


class LiveStack:
    """A stack of this project in the backend that `pulumi login` selected.

    `settings` map paths to values (`{"gpu.nodes.max": 4}`): a preview only uses them, `up` also writes them to
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
        self._engine = Engine(self._display.print_line)
        self._workspace = automation.LocalWorkspace(
            work_dir=str(folder), pulumi_command=self._engine, secrets_provider=secrets_provider
        )
        self._opened: automation.Stack | None = None

    def preview(self) -> Changes:
        """Return what `up` would change; a new stack with a settings file is created, but stays empty."""
        self._check_settings()
        stack = self._open("preview", create=True)
        with self._temporary_config(stack) as config:
            return self._run("preview", stack.preview, config_file=config, **self._policies)

    def up(self, approve: Approve | None = None, replace: Sequence[str] = ()) -> StackOutputs:
        """Apply the settings to the cloud, if `approve` accepts the preview, and return the outputs.

        The resources with the URNs `replace` are replaced even if nothing about them changes.
        """
        replaced = {"replace": list(replace)} if replace else {}
        self._check_settings()
        stack = self._open("up", create=True)
        self._check_account("up", stack)
        with self._temporary_config(stack) as config:
            if approve or config:
                plan = self._run("preview", stack.preview, config_file=config, **self._policies, **replaced)
                if approve and not approve(plan):
                    raise CancelledError("nothing was changed")
            if config:
                Path(config).replace(self._file)
        self._run("up", stack.up, **self._policies, **replaced)
        return self.outputs()

    def refresh(self) -> Changes:
        """Update the state from the cloud without changing the cloud."""
        stack = self._open("refresh")
        self._check_account("refresh", stack)
        for urn in self._query("refresh", lambda: _pending_creations(stack)):
            self._display.print_line(f"warning: an update was interrupted while it created {urn}: check if it exists")
        return self._run("refresh", stack.refresh, clear_pending_creates=True)

    def destroy(self) -> Changes:
        """Delete everything except what `storage.on_destroy keep` keeps; the stack and its settings remain."""
        stack = self._open("destroy")
        self._check_account("destroy", stack)
        resources = self._query("destroy", lambda: _resources(stack))
        kept = [item["urn"].rpartition("::")[2] for item in resources if item.get("retainOnDelete")]
        changes = self._run("destroy", stack.destroy)
        if kept:
            self._display.print_line(f"kept because of storage.on_destroy: {', '.join(kept)}")
        return changes

    def outputs(self) -> StackOutputs:
        """Return the outputs of the last `up`."""
        found = self._query("outputs", self._open("outputs").outputs)
        return parse_outputs(self.name, {key: output.value for key, output in found.items()})

    def outputs_if_up(self) -> StackOutputs | None:
        """Return the outputs of the last `up`, None for a stack that does not exist yet."""
        stack = self._open_if_created("outputs")
        found = self._query("outputs", stack.outputs) if stack else {}
        return parse_outputs(self.name, {key: output.value for key, output in found.items()}) if found else None

    def state(self) -> State:
        """Return what the backend knows of the stack, which may not exist in it."""
        stack, project = self._open_if_created("orphans"), self._workspace.project_settings().name
        return self._query("orphans", lambda: read_state(stack, self._workspace, project))

    @property
    def _file(self) -> Path:
        return self.folder / f"Pulumi.{self.name}.yaml"

    def _check_settings(self) -> None:
        """Check the settings first, because starting the engine takes seconds."""
        if self.name in configuration.list_stacks(self.folder):
            found = self._query("preview", lambda: configuration.read(self.name, self._settings, self.folder))
            self._query("preview", lambda: found.parse([find_access_problems]))

    def _open(self, verb: str, *, create: bool = False) -> automation.Stack:
        """Return the stack in the backend; with `create`, create one that has only a settings file."""
        if self._opened is None:
            try:
                self._opened = self._query(verb, lambda: automation.Stack.select(self.name, self._workspace))
            except _UnknownError:
                files = configuration.list_stacks(self.folder)
                if not create or self.name not in files:
                    stacks = [item.name for item in self._query(verb, self._workspace.list_stacks)]
                    raise diagnosis.unknown_stack(self.name, stacks, files) from None
                self._display.print_line(f"creating stack {self.name!r}")
                self._opened = self._query(verb, lambda: automation.Stack.create(self.name, self._workspace))
        return self._opened

    def _open_if_created(self, verb: str) -> automation.Stack | None:
        """Return the stack in the backend, None for one that has only a settings file."""
        try:
            return self._open(verb)
        except OperationError:
            stacks = [item.name for item in self._query(verb, self._workspace.list_stacks)]
            if self.name in stacks or self.name not in configuration.list_stacks(self.folder):
                raise
            return None

    @contextmanager
    def _temporary_config(self, stack: automation.Stack) -> Iterator[str | None]:
        """Yield a temporary copy of the stack's file with this object's settings, None without settings."""
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
            self._query("preview", lambda: self._engine.run(command, str(self.folder), {}))
            yield name
        finally:
            copy.unlink(missing_ok=True)

    def _check_account(self, verb: str, stack: automation.Stack) -> None:
        """Raise OperationError if the credentials belong to another account than the stack's."""
        stack_account = self._query(verb, stack.outputs).get("account")
        if stack_account is None:
            return
        config = self._query(verb, stack.get_all_config)
        project = self._workspace.project_settings().name
        values = {key: str(item.value) for key, item in config.items()}
        configured = configuration.Configuration(project, self.name, values).parse_leniently()
        provider_config = {key: item for key, item in config.items() if not key.startswith(f"{project}:")}
        found = self._query(verb, lambda: account.find_account(configured, provider_config, self._engine))
        if found != stack_account.value:
            raise account.mismatch(self.name, verb, str(stack_account.value), found, configured.cloud.login)

    def _run(self, verb: str, operation: Callable[..., object], **options: object) -> Changes:
        """Run one operation and show its progress instead of the engine's output."""
        require_environment(self.folder)
        progress = Progress(planning=verb == "preview", log=self._display.print_line)
        start = time.monotonic()
        before = self._engine.interrupts
        try:
            with (
                self._display.show(f"{verb} of stack {self.name}", progress),
                self._hold_tunnel_of_state(verb, options),
            ):
                operation(on_event=progress.event, color="never", suppress_progress=True, **options)
        except CommandError as error:
            attempt = diagnosis.Attempt(verb, self.name, self._describe_remaining(verb), self._known_causes())
            if self._engine.interrupts > before:
                raise _cancelled(attempt) from None
            raise diagnosis.explain(error, attempt, progress.errors, progress.violations) from None
        except tunnel.TunnelError as error:
            raise OperationError(str(error)) from None
        if verb == "preview" and self._engine.interrupts > before:
            raise _cancelled(diagnosis.Attempt(verb, self.name))
        seconds = time.monotonic() - start
        self._display.print_line(progress.summary(seconds))
        return Changes(progress.counts, progress.num_unchanged, seconds)

    def _known_causes(self) -> Sequence[Cause]:
        """Return the doctor's causes on the stack's cloud, then those of all clouds."""
        if self.name not in configuration.list_stacks(self.folder):
            return ()
        try:
            doctor = configuration.read(self.name, None, self.folder).parse_leniently().cloud.doctor
        except ValueError:
            return ()
        return (*(doctor.CAUSES if doctor else ()), *GENERAL, *CLUSTER)

    def hold_tunnel(self, on_open: Callable[[tunnel.Tunnel], None]) -> None:
        """Hold the tunnel to the stack's Kubernetes API until Ctrl-C; raise OperationError if the stack has none."""
        stack = self._open_if_created("tunnel")
        found = tunnel.find(self._query("tunnel", self._read_state)) if stack else None
        if found is None and (stack is None or not self._query("tunnel", stack.outputs)):
            raise OperationError(
                f"stack {self.name!r} is not up yet, so it has no tunnel. Fix: python -m infra up --stack {self.name}"
            )
        if found is None:
            raise OperationError(
                f"the API of stack {self.name!r} is reached without a tunnel. "
                f"Fix: python -m infra doctor --stack {self.name}, which checks the access"
            )
        try:
            keeper = tunnel.hold(found)
        except tunnel.TunnelError as error:
            raise OperationError(str(error)) from None
        if keeper is None:
            raise OperationError(f"another process holds the tunnel of stack {self.name!r} already; it can be used")
        on_open(found)
        try:
            keeper.wait()
        finally:
            keeper.close()

    @contextmanager
    def _hold_tunnel_of_state(self, verb: str, options: Mapping[str, Any]) -> Iterator[None]:
        """Hold the tunnel that the objects in the state need; continue without it if its machine is gone.

        Without it only these objects fail. The program of `up` opens its own, after it has created a missing machine.
        """
        replaced = options.get("replace", ())
        kept = [item for item in self._query(verb, self._read_state) if item.get("urn") not in replaced]
        found = tunnel.find(kept) if any(item["type"].startswith("kubernetes:") for item in kept) else None
        with ExitStack() as stack:
            try:
                stack.enter_context(tunnel.held(found, tunnel.REOPEN_SECONDS))
            except tunnel.NotOpenError as error:
                assert found
                machine = tunnel.find_machine(found, kept)
                fix = f"python -m infra up --stack {self.name} --replace '{machine}', which replaces the machine"
                self._display.print_line(f"warning: {error.reason}; continuing without it. Fix: {fix}")
            yield

    def _read_state(self) -> list[dict[str, Any]]:
        """Return all resources of the opened stack's state."""
        state = self._opened.export_stack().deployment if self._opened else None
        return (state or {}).get("resources") or []

    def _describe_remaining(self, verb: str) -> str:
        """Describe what the state holds after a failure."""
        if verb == "preview" or self._opened is None:
            return ""
        try:
            resources, pending = _resources(self._opened), _pending_creations(self._opened)
        except CommandError:
            return "unknown, because the state cannot be read"
        text = f"{len(resources)} resources in the state"
        if not pending:
            return text
        names = ", ".join(urn.rpartition("::")[2] for urn in pending)
        return f"{text}, {len(pending)} incomplete ({names}): python -m infra refresh --stack {self.name}"

    def _query(self, verb: str, query: Callable[[], ResultT]) -> ResultT:
        """Run a short command, and raise OperationError if it fails or the user presses Ctrl-C."""
        before, attempt = self._engine.interrupts, diagnosis.Attempt(verb, self.name)
        try:
            result = query()
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
        return result


class _UnknownError(Exception):
    """A stack that does not exist in the backend."""


def _resources(stack: automation.Stack) -> list[dict[str, Any]]:
    """Return the state's resources without the stack itself, components and providers."""
    return custom_resources(stack.export_stack().deployment or {})


def _pending_creations(stack: automation.Stack) -> list[str]:
    """Return the URNs of resources whose creation was interrupted."""
    pending = (stack.export_stack().deployment or {}).get("pending_operations") or []
    return [item["resource"]["urn"] for item in pending]


def _cancelled(attempt: diagnosis.Attempt) -> CancelledError:
    remaining = f"remaining: {attempt.remaining}" if attempt.remaining else "nothing was changed"
    what = f"{attempt.verb} of stack {attempt.stack!r} was cancelled"
    return CancelledError(f"{what}; {remaining}\n  to continue: {attempt.retry_command}")


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
