"""The clouds this project can provision: one folder each, found by looking, imported only when chosen."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import pulumi

    from infra.config.settings import StackSettings
    from infra.contract import Cluster, Credentials, Provision, Serve, TrainingService
    from infra.findings.model import CloudDoctor


@dataclass(frozen=True)
class Cloud:
    """One cloud: its name and its settings; the SDK is imported by `provision`, not before."""

    name: str
    settings: type[StackSettings]

    def provision(self, name: str, settings: StackSettings, opts: pulumi.ResourceOptions | None = None) -> Cluster:
        """Register the cluster that `settings` describe."""
        assert isinstance(settings, self.settings), f"{type(settings).__name__} is not {self.name}'s"
        module = importlib.import_module(f"{__name__}.{self.name}.provision")
        return cast("Provision[StackSettings]", module.provision)(name, settings, opts)

    def serve(self, name: str, settings: StackSettings, opts: pulumi.ResourceOptions | None = None) -> TrainingService:
        """Register the cloud's own training service, where `settings.service` names it."""
        assert isinstance(settings, self.settings), f"{type(settings).__name__} is not {self.name}'s"
        module = importlib.import_module(f"{__name__}.{self.name}.service")
        return cast("Serve[StackSettings]", module.serve)(name, settings, opts)

    def account(self, settings: StackSettings) -> pulumi.Input[str]:
        """Whose resources the credentials in use reach; a plain text where nobody needs to be asked."""
        assert isinstance(settings, self.settings), f"{type(settings).__name__} is not {self.name}'s"
        return cast("Credentials", self._credentials).account(settings)

    @property
    def asks_for_account(self) -> bool:
        """Whether `account` asks the cloud, which only a running program can."""
        return cast("Credentials", self._credentials).ASKS

    @property
    def login(self) -> str:
        """The command that renews the credentials."""
        return cast("Credentials", self._credentials).LOGIN

    def refuses(self, message: str) -> bool:
        """Whether a provider's message says that the credentials are missing or have expired."""
        return any(text in message for text in cast("Credentials", self._credentials).REFUSED)

    @property
    def doctor(self) -> CloudDoctor | None:
        """What looks at the account before anything is made there; None for a cloud that has no such file."""
        name = f"{__name__}.{self.name}.doctor"
        return cast("CloudDoctor", importlib.import_module(name)) if importlib.util.find_spec(name) else None

    @property
    def _credentials(self) -> object:
        return importlib.import_module(f"{__name__}.{self.name}.credentials")


def available() -> tuple[str, ...]:
    """Names of the clouds, which are the names of the folders here that have a `settings.py`."""
    return tuple(sorted(folder.name for folder in folders()))


def folders() -> list[Path]:
    """The folder of each cloud."""
    return [folder for root in __path__ for folder in Path(root).iterdir() if (folder / "settings.py").is_file()]


def load(cloud: str) -> Cloud:
    """The chosen cloud; nothing of another one is imported."""
    module = importlib.import_module(f"{__name__}.{cloud}.settings")
    return Cloud(cloud, cast("type[StackSettings]", module.Settings))
