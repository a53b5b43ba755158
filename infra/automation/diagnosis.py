"""Explains a failed operation in a few lines: the resource, the cause, what remains, and what to run next."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pulumi.automation.errors import CommandError, ConcurrentUpdateError

from infra import clouds
from infra.automation.errors import OperationError
from infra.automation.progress import Diagnostic
from infra.exit_codes import FAILURE
from infra.findings.model import Cause
from infra.text import one_line

_LOCK_HOLDER = re.compile(r"created by (.+? at \S+)")
_MAX_CAUSES = 5
#: Messages of the engine that repeat an error without its cause.
_NOISE = re.compile(r"^(update|preview|refresh|destroy|resource (creation|update|deletion)) (failed|canceled)$")
_TRACE = "Traceback (most recent call last):"
_BULLETS = re.compile(r"^\d+ errors? occurred:\s*\*\s*", re.DOTALL)
#: States of a resource that exists although its creation failed. The engine retries such a creation as an update
#: without changes, which succeeds and leaves the resource as it is: https://github.com/pulumi/pulumi/issues/17881
_DEAD_STATES = ("CREATE_FAILED", "was created in the error state")
_PROVIDER_SOURCE = re.compile(r"^sdk-v2/provider2?\.go:\d+: sdk\.helper_schema: (.*): provider=\S+$", re.DOTALL)


@dataclass(frozen=True)
class Attempt:
    """An operation on a stack; `remaining` describes what the state holds after it, empty where nothing started.

    `causes` are the doctor's known causes on the stack's cloud, most specific first.
    """

    verb: str
    stack: str
    remaining: str = ""
    causes: Sequence[Cause] = ()

    @property
    def retry_command(self) -> str:
        """Return the command that runs the operation again."""
        return f"python -m infra {self.verb} --stack {self.stack}"


def explain(
    error: CommandError, attempt: Attempt, errors: Sequence[Diagnostic], violations: Sequence[Diagnostic]
) -> OperationError:
    """Return the error that the user sees instead of the engine's output."""
    text = f"{_stderr(error)}\n" + "\n".join(item.message for item in errors)
    if isinstance(error, ConcurrentUpdateError):
        return OperationError(_locked(_stderr(error), attempt))
    return (
        _explain_backend(text, attempt)
        or _explain_credentials(text, attempt)
        or _explain_policies(violations, attempt)
        or _explain_settings(errors)
        or _explain_resources(errors, attempt)
        or _explain_program(errors, attempt)
        or OperationError(f"{attempt.verb} of stack {attempt.stack!r} failed: {_shorten(_stderr(error))}", FAILURE)
    )


def unknown_stack(stack: str, stacks: Iterable[str], files: Iterable[str]) -> OperationError:
    """Return the error for a stack that does not exist in the backend."""
    known, configured = ", ".join(sorted(stacks)) or "none", ", ".join(sorted(files)) or "none"
    fix = f". Fix: python -m infra up --stack {stack}, which creates it" if stack in files else ""
    return OperationError(f"no such stack: got {stack!r}; existing: {known}; with a settings file: {configured}{fix}")


def _locked(text: str, attempt: Attempt) -> str:
    holders = ", ".join(_LOCK_HOLDER.findall(text)) or "another update"
    return (
        f"stack {attempt.stack!r} is locked by {holders}. Fix: wait until it ends, or, if it no longer runs: "
        f"pulumi cancel --stack {attempt.stack}"
    )


def _explain_backend(text: str, attempt: Attempt) -> OperationError | None:
    """Explain why the secrets or the state cannot be read; the operation has not started."""
    variable = "PULUMI_CONFIG_PASSPHRASE"
    if "incorrect passphrase" in text:
        return OperationError(
            f"wrong passphrase for the secrets of stack {attempt.stack!r}. Fix: set {variable} or {variable}_FILE"
        )
    if "passphrase must be set" in text:
        return OperationError(
            f"no passphrase for the secrets of stack {attempt.stack!r}. Fix: export {variable}=... (or {variable}_FILE)"
        )
    if "PULUMI_ACCESS_TOKEN must be set" in text or "invalid access token" in text:
        return OperationError(
            "not logged in to a state backend. Fix: run one of pulumi login, pulumi login s3://<bucket>, "
            "pulumi login --local (https://www.pulumi.com/docs/iac/concepts/state-and-backends/)"
        )
    return None


def _explain_credentials(text: str, attempt: Attempt) -> OperationError | None:
    for name in clouds.available():
        cloud = clouds.load(name)
        if cloud.refuses(text):
            message = next(line for line in text.splitlines() if cloud.refuses(line))
            return OperationError(
                f"{name} rejects the credentials ({_shorten(message, 160)}){_describe_remaining(attempt)}\n"
                f"  run: {cloud.login}, then: {attempt.retry_command}"
            )
    return None


def _explain_policies(violations: Sequence[Diagnostic], attempt: Attempt) -> OperationError | None:
    if not violations:
        return None
    lines = [f"  {_subject(item)}: {_shorten(item.message, 400)}" for item in dict.fromkeys(violations)]
    count = "1 violation" if len(lines) == 1 else f"{len(lines)} violations"
    fix = f"  fix the settings, or configure the rule with --policy-config FILE, then: {attempt.retry_command}"
    return OperationError("\n".join([f"policies stop {attempt.verb} of stack {attempt.stack!r}: {count}", *lines, fix]))


def _explain_settings(errors: Sequence[Diagnostic]) -> OperationError | None:
    """Return the program's own message about its settings, which names every key and its fix."""
    found = next((item.message for item in errors if item.is_from_program and "to fix\n" in item.message), None)
    return OperationError(found) if found else None


def _explain_resources(errors: Sequence[Diagnostic], attempt: Attempt) -> OperationError | None:
    causes: dict[str, str] = {}
    for item in errors:
        if not item.is_from_program and not _NOISE.match(item.message):
            # Of several messages about one resource the last one is the provider's.
            causes[_subject(item)] = item.message
    if not causes:
        return None
    lines = []
    for subject, message in list(causes.items())[:_MAX_CAUSES]:
        lines += [f"{subject}: {extract_cause(message)}", *_known_cause(message, attempt)]
    lines = list(dict.fromkeys(lines))  # several resources fail for one cause
    lines += [f"and {len(causes) - _MAX_CAUSES} more"] if len(causes) > _MAX_CAUSES else []
    lines += [f"remaining: {attempt.remaining}"] if attempt.remaining else []
    or_destroy = f"   (or delete everything: python -m infra destroy --stack {attempt.stack})"
    dead = _dead_resources(errors) if attempt.verb == "up" else []  # the other verbs have no --replace
    retry = attempt.retry_command + "".join(f" --replace '{urn}'" for urn in dead)
    lines += [f"fix the cause, then: {retry}{or_destroy if attempt.verb == 'up' else ''}"]
    return OperationError("\n  ".join(lines), FAILURE)


def _known_cause(message: str, attempt: Attempt) -> list[str]:
    """Return the line that explains a cloud's error and names its fix, none for an unknown error."""
    found = next((cause for cause in attempt.causes if any(error in message for error in cause.errors)), None)
    if found is None:
        return []
    return [f"  why: {found.reason}. Fix: {found.generic_fix.replace('<stack>', attempt.stack)}"]


def _dead_resources(errors: Sequence[Diagnostic]) -> list[str]:
    """Return the URNs of resources that exist in a state which only a replacement ends."""
    found = [item.urn for item in errors if item.urn and any(state in item.message for state in _DEAD_STATES)]
    return list(dict.fromkeys(found))


def _explain_program(errors: Sequence[Diagnostic], attempt: Attempt) -> OperationError | None:
    messages = [item.message for item in errors if not _NOISE.match(item.message)]
    if not messages:
        return None
    message = next((text for text in messages if "unhandled error" not in text), messages[0])
    trace = f"\n  for the whole trace: pulumi preview --stack {attempt.stack}" if _TRACE in message else ""
    cause = f"{extract_cause(message)}{_describe_remaining(attempt)}"
    text = f"{attempt.verb} of stack {attempt.stack!r}: {cause}{trace}"
    return OperationError(text, FAILURE)


def extract_cause(message: str) -> str:
    """Return the one line of a provider's message that names the cause, without trace and prefixes."""
    text = message.strip()
    if _TRACE in text:
        # Of chained traces the last one belongs to the error that was raised last.
        after = [line for line in text.rpartition(_TRACE)[2].splitlines() if line and not line.startswith(" ")]
        text = re.sub(r"^[\w.]*(Exception|Error): ", "", after[0]) if after else "the program failed"
    wrapped = _PROVIDER_SOURCE.match(text)
    text = wrapped.group(1) if wrapped else text
    return _shorten(_BULLETS.sub("", text))


def _subject(item: Diagnostic) -> str:
    return f"{item.type} {item.name}".strip()


def _describe_remaining(attempt: Attempt) -> str:
    return f"; remaining: {attempt.remaining}" if attempt.remaining else ""


def _stderr(error: CommandError) -> str:
    """Return what the command wrote to stderr; the SDK only has it as text after a heading."""
    return str(error).partition("\n stderr: ")[2]


def _shorten(text: str, max_length: int = 300) -> str:
    """Return a message on one line, without the prefix of the command line."""
    return one_line(text.removeprefix("error: "), max_length)
