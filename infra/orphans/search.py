"""Searches a cloud for one stack's resources, several kinds at a time, and compares them with the state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from infra import stack_files
from infra.automation import LiveStack
from infra.automation.display import Silent
from infra.config.problems import SettingsError
from infra.doctor import runner
from infra.exit_codes import CHECK_FAILED, ORPHANS_FOUND, SUCCESS
from infra.findings.model import Check, Context, Finding, ok
from infra.findings.orphans import CloudOrphans, Leftover, Search
from infra.orphans import ownership
from infra.orphans.ownership import normalize
from infra.stack import Stack

#: The first check of a cloud's doctor, which also shows that the account is the stack's.
_CREDENTIALS = "credentials"
#: The time limit of one kind; a list of thousands of entries has many pages.
_SECONDS = 90.0


@dataclass(frozen=True)
class Report:
    """The result of a search; `not_checked` are the kinds that could not be listed, each with its reason and fix.

    `withheld` are the reasons why no command is printed.
    """

    stack: str
    account: str
    orphans: Sequence[Leftover]
    kept: Sequence[Leftover]
    not_checked: Sequence[Finding]
    num_kinds: int
    withheld: Sequence[str] = ()

    @property
    def exit_code(self) -> int:
        """Return the exit code; an orphan counts more than a kind that could not be listed."""
        return ORPHANS_FOUND if self.orphans else CHECK_FAILED if self.not_checked else SUCCESS

    @property
    def usd_per_hour(self) -> float:
        """Return the sum of the known prices of all orphans."""
        return sum(item.usd_per_hour or 0.0 for item in self.orphans)

    def as_dict(self) -> dict[str, object]:
        """Return plain values for JSON."""
        return {
            "stack": self.stack,
            "exit_code": self.exit_code,
            "account": self.account,
            "usd_per_hour": round(self.usd_per_hour, 4),
            "orphans": [_as_row(item) for item in self.orphans],
            "kept": [_as_row(item) for item in self.kept],
            "withheld": list(self.withheld),
            "not_checked": [{"kind": item.check, "reason": item.result, "fix": item.fix} for item in self.not_checked],
        }


def search(name: str, folder: Path = stack_files.ROOT, *, is_only_state: bool = False) -> Report:
    """Return what stack `name` left; raise ValueError for an unknown stack, OperationError for an unreadable state.

    With `is_only_state`, the user has confirmed that no other backend has this stack.
    """
    stack_files.require_file(name, folder)
    configuration = stack_files.read(name, None, folder)
    cloud = configuration.parse_leniently().cloud
    orphans, doctor = cloud.orphans, cloud.doctor
    if orphans is None or doctor is None:
        return Report(name, "the stack has no resources outside its cluster", (), (), (), 0)
    stack = _parse_needed(configuration)
    live = LiveStack(name, folder=folder, display=Silent())
    outputs = live.outputs_if_up()
    before = live.state()
    job = stack.sections["job"].model_extra or {}
    context = Context(stack.settings, configuration.values, job, dataclasses.asdict(outputs) if outputs else None)
    searches = orphans.searches(context)
    found, findings = run(searches, doctor.checks(context)[0], f"orphans of stack {name}")
    # The state is read again: an update that began meanwhile has created what the first reading does not know.
    states = (before, live.state())
    account, *rest = findings
    not_checked = [item for item in findings if item.status in ("problem", "unknown")]
    resources = [resource for state in states for resource in state.resources]
    orphaned, kept = compare(found, resources, orphans)
    failed = {item.check for item in not_checked}
    unlisted = [query.kind for query in searches if query.finds_clusters and query.kind in failed]
    unknown = ownership.not_in_state(found, resources)
    reasons = ownership.reasons(name, states, unknown, unlisted, is_only_state=is_only_state)
    reasons = reasons if orphaned or kept else []
    if reasons:
        orphaned, kept = (ownership.without_commands(items, reasons) for items in (orphaned, kept))
    result = account.result if account.status == "ok" else "the account is unknown"
    return Report(name, result, orphaned, kept, not_checked, len(rest), [item.text for item in reasons])


def _parse_needed(configuration: stack_files.Configuration) -> Stack:
    """Return the settings even if some are wrong; raise SettingsError for those that decide what is found.

    These are the provider's account and region, ids of resources outside the stack, and whether checkpoints are kept.
    """
    try:
        return configuration.parse()
    except SettingsError as error:
        found = configuration.parse_leniently()
        settings = found.settings
        needed = {"storage.on_destroy", *settings.provider_keys.values()}
        problems = [
            problem
            for problem in error.problems
            if problem.key in needed
            or problem.key.endswith("_id")
            or isinstance(getattr(settings, problem.key, None), BaseModel)
        ]
        if problems:
            raise SettingsError(configuration.stack, problems) from None
        return found


def run(searches: Sequence[Search], credentials: Check, title: str) -> tuple[list[Leftover], list[Finding]]:
    """Run all searches in parallel; return what they found, in their order, and one finding for each of them."""
    found: dict[str, list[Leftover]] = {}

    def collect(query: Search) -> Callable[[], Finding]:
        def check() -> Finding:
            listed = list(query.run())
            found[query.kind] = listed
            return ok(f"{len(listed)} found")

        return check

    first = Check(_CREDENTIALS, credentials.run, seconds=_SECONDS)
    checks = [Check(query.kind, collect(query), _CREDENTIALS, _SECONDS) for query in searches]
    findings = runner.run([first, *checks], title)
    return [item for query in searches for item in found.get(query.kind, ())], findings


def compare(
    found: Sequence[Leftover], resources: Sequence[Mapping[str, Any]], cloud: CloudOrphans
) -> tuple[list[Leftover], list[Leftover]]:
    """Return the orphans and what is kept on purpose; what the state knows, or its cluster uses, is neither."""
    has_cluster = any(resource["type"] == cloud.CLUSTER for resource in resources)
    unknown = [item for item in ownership.not_in_state(found, resources) if not (item.of_cluster and has_cluster)]
    return _fold([item for item in unknown if not item.kept]), [item for item in unknown if item.kept]


def _fold(orphans: Sequence[Leftover]) -> list[Leftover]:
    """Replace what is inside an orphan by its number and its price: one command deletes all of it."""
    containers = {normalize(item.id) for item in orphans}
    folded = []
    for item in orphans:
        if normalize(item.inside) in containers:
            continue
        inner = [one for one in orphans if normalize(one.inside) == normalize(item.id)]
        prices = [one.usd_per_hour for one in (item, *inner) if one.usd_per_hour is not None]
        kind = f"{item.kind} with {len(inner)} resources" if inner else item.kind
        folded.append(dataclasses.replace(item, kind=kind, usd_per_hour=sum(prices) if prices else None))
    return folded


def _as_row(item: Leftover) -> dict[str, object]:
    row = dataclasses.asdict(item)
    del row["aliases"], row["of_cluster"], row["inside"], row["live"]
    return row
