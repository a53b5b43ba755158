"""Reads a kubeconfig and extracts the one context that the stack uses."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import yaml

_FILE_KEYS = ("certificate-authority", "client-certificate", "client-key", "tokenFile")


@dataclass(frozen=True)
class Kubeconfig:
    """A parsed kubeconfig: its path, its contexts, the current context, and the document itself."""

    path: Path
    contexts: tuple[str, ...]
    current: str | None
    document: dict[str, object]


def locate(path: str | None) -> Path:
    """Return the file that kubectl would use: `path`, else the first of $KUBECONFIG, else ~/.kube/config."""
    given = path or os.environ.get("KUBECONFIG", "").split(os.pathsep)[0]
    return Path(given).expanduser() if given else Path.home() / ".kube" / "config"


def read(path: Path) -> Kubeconfig:
    """Parse the file, or raise ValueError with a one-line message if it is missing or not a kubeconfig."""
    try:
        document = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {str(error).splitlines()[0]}") from None
    listed = document.get("contexts") if isinstance(document, dict) else None
    if not isinstance(listed, list):
        raise ValueError(f"{path} has no list of contexts")  # noqa: TRY004 - the content of the file is wrong, not a type
    names = tuple(str(item["name"]) for item in listed if isinstance(item, dict) and "name" in item)
    current = document.get("current-context")
    return Kubeconfig(path, names, str(current) if current else None, document)


def extract_context(kubeconfig: Kubeconfig, context: str) -> str:
    """Return a kubeconfig as YAML with only `context`, its cluster and its user, and with absolute file paths."""
    chosen = _find_entry(kubeconfig.document, "contexts", context)
    inner = chosen.get("context")
    assert isinstance(inner, dict), f"context {context} is empty"
    cluster = _with_absolute_paths(
        _find_entry(kubeconfig.document, "clusters", str(inner.get("cluster"))), "cluster", kubeconfig.path
    )
    users = [str(inner["user"])] if "user" in inner else []
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": context,
        "contexts": [chosen],
        "clusters": [cluster],
        "users": [
            _with_absolute_paths(_find_entry(kubeconfig.document, "users", user), "user", kubeconfig.path)
            for user in users
        ],
    }
    return yaml.safe_dump(document, sort_keys=True)


def find_server(kubeconfig: Kubeconfig, context: str) -> str:
    """Return the address of a context's API server, or raise ValueError if the file does not name it."""
    inner = _find_entry(kubeconfig.document, "contexts", context).get("context")
    cluster = inner.get("cluster") if isinstance(inner, dict) else None
    found = _find_entry(kubeconfig.document, "clusters", str(cluster)).get("cluster")
    address = found.get("server") if isinstance(found, dict) else None
    if not address:
        raise ValueError(f"{kubeconfig.path} names no server for context {context!r}")
    return str(address)


def _find_entry(document: dict[str, object], kind: str, name: str) -> dict[str, object]:
    items = document.get(kind)
    for item in items if isinstance(items, list) else []:
        if isinstance(item, dict) and item.get("name") == name:
            return dict(item)
    raise ValueError(f"the kubeconfig has no entry {name!r} under {kind}")


def _with_absolute_paths(item: dict[str, object], kind: str, path: Path) -> dict[str, object]:
    inner = item.get(kind)
    if not isinstance(inner, dict):
        return item
    absolute = {
        key: str((path.parent / str(value)).resolve()) if key in _FILE_KEYS else value for key, value in inner.items()
    }
    return {**item, kind: absolute}
