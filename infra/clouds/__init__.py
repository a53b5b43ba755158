"""The clouds that this project can provision: one folder each, discovered at run time, imported only when chosen."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import pulumi

    from infra.config.settings import StackSettings
    from infra.contract import Cluster, Credentials, Provision, Serve, TrainingService
    from infra.findings.model import CloudDoctor
    from infra.findings.orphans import CloudOrphans
    from infra.policy_facts import CloudPolicy


@dataclass(frozen=True)
class Cloud:
    """One cloud: its name and its settings class. Its other modules, and its SDK, are imported on first use."""

    name: str
    settings: type[StackSettings]

    def provision(self, name: str, settings: StackSettings, opts: pulumi.ResourceOptions | None = None) -> Cluster:
        """Register the resources of the cluster that `settings` describe."""
        self._check(settings)
        return cast("Provision[StackSettings]", self._module("provision").provision)(name, settings, opts)

    def serve(self, name: str, settings: StackSettings, opts: pulumi.ResourceOptions | None = None) -> TrainingService:
        """Register the resources of the cloud's own training service, which `settings.service` names."""
        self._check(settings)
        return cast("Serve[StackSettings]", self._module("service").serve)(name, settings, opts)

    def account(self, settings: StackSettings) -> pulumi.Input[str]:
        """Return the account that the credentials belong to; a plain string where no API call is needed."""
        self._check(settings)
        return self._credentials.account(settings)

    @property
    def asks_for_account(self) -> bool:
        """Return whether `account` calls the cloud, which works only inside a Pulumi program."""
        return self._credentials.ASKS

    @property
    def login(self) -> str:
        """Return the command that renews the credentials."""
        return self._credentials.LOGIN

    def refuses(self, message: str) -> bool:
        """Return whether a provider's message means that the credentials are missing or have expired."""
        return any(text in message for text in self._credentials.REFUSED)

    @property
    def doctor(self) -> CloudDoctor | None:
        """Return the checks of the account that run before `up`, None for a cloud without a `doctor.py`."""
        has_doctor = importlib.util.find_spec(f"{__name__}.{self.name}.doctor")
        return cast("CloudDoctor", self._module("doctor")) if has_doctor else None

    @property
    def orphans(self) -> CloudOrphans | None:
        """Return the searches for what `destroy` left, None for a cloud without an `orphans` package."""
        has_orphans = importlib.util.find_spec(f"{__name__}.{self.name}.orphans")
        return cast("CloudOrphans", self._module("orphans")) if has_orphans else None

    @property
    def _credentials(self) -> Credentials:
        return cast("Credentials", self._module("credentials"))

    def _module(self, name: str) -> ModuleType:
        return importlib.import_module(f"{__name__}.{self.name}.{name}")

    def _check(self, settings: StackSettings) -> None:
        assert isinstance(settings, self.settings), f"settings of another cloud than {self.name}: {type(settings)}"


def available() -> tuple[str, ...]:
    """Return the names of the clouds: the names of their folders."""
    return tuple(sorted(folder.name for folder in folders()))


def folders() -> list[Path]:
    """Return the folder of each cloud: each folder in this package that has a `settings.py`."""
    return [folder for root in __path__ for folder in Path(root).iterdir() if (folder / "settings.py").is_file()]


def policy(cloud: str) -> CloudPolicy:
    """Return what the policy pack must know about a cloud's resource types, without importing its settings."""
    return cast("CloudPolicy", importlib.import_module(f"{__name__}.{cloud}.policy").POLICY)


def load(cloud: str) -> Cloud:
    """Return the chosen cloud without importing any other."""
    module = importlib.import_module(f"{__name__}.{cloud}.settings")
    return Cloud(cloud, cast("type[StackSettings]", module.Settings))
