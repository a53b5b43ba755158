"""Why an operation failed, in few lines: the resource, the cause, what is left, what to run next."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pulumi.automation.errors import CommandError, ConcurrentUpdateError

from infra import clouds
from infra.automation.errors import OperationError
from infra.automation.progress import Complaint
from infra.exit_codes import FAILURE

_HOLDER = re.compile(r"created by (.+? at \S+)")
_MOST_CAUSES = 5
#: What the engine says after the errors that matter, or around them.
_NOISE = re.compile(r"^(update|preview|refresh|destroy|resource (creation|update|deletion)) (failed|canceled)$")
_TRACE = "Traceback (most recent call last):"
_BULLETS = re.compile(r"^\d+ errors? occurred:\s*\*\s*", re.DOTALL)
_PROVIDER_SOURCE = re.compile(r"^sdk-v2/provider2?\.go:\d+: sdk\.helper_schema: (.*): provider=\S+$", re.DOTALL)


@dataclass(frozen=True)
class Attempt:
    """What was tried on which stack, and what it left: `left` says it in words, empty where nothing was begun."""

    verb: str
    stack: str
    left: str = ""

    @property
    def again(self) -> str:
        """The command that tries again."""
        return f"python -m infra {self.verb} --stack {self.stack}"


def explain(
    error: CommandError, attempt: Attempt, complaints: Sequence[Complaint], violations: Sequence[Complaint]
) -> OperationError:
    """The error that a person is shown instead of the engine's output."""
    said = f"{_stderr(error)}\n" + "\n".join(complaint.message for complaint in complaints)
    if isinstance(error, ConcurrentUpdateError):
        return OperationError(_locked(_stderr(error), attempt))
    return (
        _of_backend(said, attempt)
        or _of_credentials(said, attempt)
        or _of_policies(violations, attempt)
        or _of_settings(complaints)
        or _of_resources(complaints, attempt)
        or _of_program(complaints, attempt)
        or OperationError(f"{attempt.verb} of stack {attempt.stack!r} failed: {_one_line(_stderr(error))}", FAILURE)
    )


def unknown(stack: str, known: Iterable[str], files: Iterable[str]) -> OperationError:
    """A stack that the backend has not."""
    listed = ", ".join(sorted(known)) or "none"
    new = f"; python -m infra up --stack {stack} makes it" if stack in files else ""
    configured = ", ".join(sorted(files)) or "none"
    return OperationError(f"no stack {stack!r}; stacks here: {listed}; files of settings for: {configured}{new}")


def _locked(said: str, attempt: Attempt) -> str:
    holders = ", ".join(_HOLDER.findall(said)) or "another update"
    return (
        f"stack {attempt.stack!r} is locked by {holders}; wait until it ends, or, if it no longer runs: "
        f"pulumi cancel --stack {attempt.stack}"
    )


def _of_backend(said: str, attempt: Attempt) -> OperationError | None:
    """The secrets or the state cannot be read: nothing was begun."""
    variable = "PULUMI_CONFIG_PASSPHRASE"
    if "incorrect passphrase" in said:
        return OperationError(
            f"wrong passphrase for the secrets of stack {attempt.stack!r}: set {variable} or {variable}_FILE"
        )
    if "passphrase must be set" in said:
        return OperationError(
            f"no passphrase for the secrets of stack {attempt.stack!r}; run: export {variable}=... (or {variable}_FILE)"
        )
    if "PULUMI_ACCESS_TOKEN must be set" in said or "invalid access token" in said:
        return OperationError(
            "not logged in to where states are kept; run one of: pulumi login, pulumi login s3://<bucket>, "
            "pulumi login --local (README, section on state and secrets)"
        )
    return None


def _of_credentials(said: str, attempt: Attempt) -> OperationError | None:
    for name in clouds.available():
        cloud = clouds.load(name)
        if cloud.refuses(said):
            cause = next(line for line in said.splitlines() if cloud.refuses(line))
            return OperationError(
                f"{name} refuses the credentials ({_one_line(cause, 160)}){_after(attempt.left)}\n"
                f"  run: {cloud.login}, then: {attempt.again}"
            )
    return None


def _of_policies(violations: Sequence[Complaint], attempt: Attempt) -> OperationError | None:
    if not violations:
        return None
    lines = [f"  {_subject(item)}: {_one_line(item.message, 400)}" for item in dict.fromkeys(violations)]
    count = "1 violation" if len(lines) == 1 else f"{len(lines)} violations"
    end = f"  fix the settings, or configure the rule with --policy-config FILE, then: {attempt.again}"
    return OperationError("\n".join([f"policies stop {attempt.verb} of stack {attempt.stack!r}: {count}", *lines, end]))


def _of_settings(complaints: Sequence[Complaint]) -> OperationError | None:
    """The program's own message about its settings is complete: it names every key and its fix."""
    found = next((item.message for item in complaints if item.of_program and "to fix\n" in item.message), None)
    return OperationError(found) if found else None


def _of_resources(complaints: Sequence[Complaint], attempt: Attempt) -> OperationError | None:
    causes: dict[str, str] = {}
    for item in complaints:
        if not item.of_program and not _NOISE.match(item.message):
            # Of several messages about one resource the last is the provider's own sentence.
            causes[_subject(item)] = cause(item.message)
    if not causes:
        return None
    lines = [f"{subject}: {text}" for subject, text in list(causes.items())[:_MOST_CAUSES]]
    lines += [f"and {len(causes) - _MOST_CAUSES} more"] if len(causes) > _MOST_CAUSES else []
    lines += [f"left: {attempt.left}"] if attempt.left else []
    after = f"   (or take it all away: python -m infra destroy --stack {attempt.stack})"
    lines += [f"fix the cause, then: {attempt.again}{after if attempt.verb == 'up' else ''}"]
    return OperationError("\n  ".join(lines), FAILURE)


def _of_program(complaints: Sequence[Complaint], attempt: Attempt) -> OperationError | None:
    found = [item.message for item in complaints if not _NOISE.match(item.message)]
    if not found:
        return None
    told = next((text for text in found if "unhandled error" not in text), found[0])
    whole = f"\n  the whole trace: pulumi preview --stack {attempt.stack}" if _TRACE in told else ""
    text = f"{attempt.verb} of stack {attempt.stack!r}: {cause(told)}{_after(attempt.left)}{whole}"
    return OperationError(text, FAILURE)


def cause(message: str) -> str:
    """The one line of a provider's message that says why: no trace, no plumbing around it."""
    text = message.strip()
    if _TRACE in text:
        # Of chained traces the last one is of the error that was raised at the end.
        after = [line for line in text.rpartition(_TRACE)[2].splitlines() if line and not line.startswith(" ")]
        text = re.sub(r"^[\w.]*(Exception|Error): ", "", after[0]) if after else "the program failed"
    wrapped = _PROVIDER_SOURCE.match(text)
    text = wrapped.group(1) if wrapped else text
    return _one_line(_BULLETS.sub("", text))


def _subject(item: Complaint) -> str:
    return f"{item.type} {item.name}".strip()


def _after(left: str) -> str:
    return f"; left: {left}" if left else ""


def _stderr(error: CommandError) -> str:
    """What the command wrote to its error stream; the SDK keeps it only as text, after a heading."""
    return str(error).partition("\n stderr: ")[2]


def _one_line(text: str, most: int = 300) -> str:
    line = " ".join(text.removeprefix("error: ").split())
    return line if len(line) <= most else line[: most - 3] + "..."
