"""Searches of GKE, Filestore, Artifact Registry, Cloud KMS, IAM and Cloud Storage."""

from __future__ import annotations

from collections.abc import Iterator

from infra.clouds.gcp.orphans.owner import HOURS_PER_MONTH, NO_LABELS, Item, Owner, utc
from infra.clouds.gcp.settings import account_id
from infra.findings.orphans import Leftover, Search, shell

#: The stack's service accounts, by the last part of their ids.
_ACCOUNTS = ("nodes", "trainer")
_SCHEDULED = "DESTROY_SCHEDULED"


def clusters(owner: Owner) -> list[Search]:
    """Return the search of clusters."""
    return [Search("cluster", lambda: _clusters(owner), finds_clusters=True)]


def data(owner: Owner) -> list[Search]:
    """Return the searches of data, images, keys and rights."""
    return [
        Search("Filestore instance", lambda: _filestores(owner)),
        Search("Filestore backup", lambda: _backups(owner)),
        Search("image repository", lambda: _repositories(owner)),
        Search("KMS key version", lambda: _key_versions(owner)),
        Search("IAM binding", lambda: _bindings(owner)),
        Search("service account", lambda: _accounts(owner)),
        Search("bucket", lambda: _buckets(owner)),
    ]


def _clusters(owner: Owner) -> Iterator[Leftover]:
    for item in owner.rest.list_all("container", f"v1/projects/{owner.project}/locations/-/clusters", "clusters"):
        name, location = str(item["name"]), item["location"]
        if owner.is_cluster(name) and owner.has_labels(item.get("resourceLabels")):
            remove = _delete(owner, "container clusters", name, "location", location)
            path = f"projects/{owner.project}/locations/{item['location']}/clusters/{name}"
            price = owner.prices["control_plane"]["cluster"]
            yield Leftover("cluster", name, remove, utc(item.get("createTime")), price, aliases=(path,), live="cluster")


def _filestores(owner: Owner) -> Iterator[Leftover]:
    path = f"v1/projects/{owner.project}/locations/-/instances"
    for item in owner.rest.list_all("file", path, "instances"):
        if owner.has_labels(item.get("labels")):
            name, location = _name_and_location(str(item["name"]))
            size_gib = sum(int(share["capacityGb"]) for share in item.get("fileShares", ()))
            price = size_gib * owner.prices["filestore"]["zonal"] / HOURS_PER_MONTH
            remove = _delete(owner, "filestore instances", name, "location", location)
            since = utc(item.get("createTime"))
            yield Leftover("Filestore instance", name, remove, since, price, aliases=(str(item["name"]),))


def _backups(owner: Owner) -> Iterator[Leftover]:
    path = f"v1/projects/{owner.project}/locations/-/backups"
    for item in owner.rest.list_all("file", path, "backups"):
        source = str(item.get("sourceInstance", "")).rpartition("/")[2]
        if owner.has_labels(item.get("labels")) or owner.is_named(source, "storage-filestore"):
            name, region = _name_and_location(str(item["name"]))
            remove = _delete(owner, "filestore backups", name, "region", region)
            found = Leftover("Filestore backup", name, remove, utc(item.get("createTime")))
            yield found if owner.has_labels(item.get("labels")) else found.without_command(NO_LABELS)


def _repositories(owner: Owner) -> Iterator[Leftover]:
    path = f"v1/projects/{owner.project}/locations/{owner.settings.region}/repositories"
    for item in owner.rest.list_all("artifactregistry", path, "repositories"):
        if owner.has_labels(item.get("labels")):
            name, location = _name_and_location(str(item["name"]))
            remove = _delete(owner, "artifacts repositories", name, "location", location)
            since = utc(item.get("createTime"))
            yield Leftover("image repository", name, remove, since, aliases=(str(item["name"]),))


def _key_versions(owner: Owner) -> Iterator[Leftover]:
    """Yield the versions of the stack's keys that exist; key rings cannot be deleted and cost nothing."""
    rings = f"v1/projects/{owner.project}/locations/{owner.settings.region}/keyRings"
    for ring in owner.rest.list_all("cloudkms", rings, "keyRings"):
        if not owner.is_named(str(ring["name"]).rpartition("/")[2], "cluster-keys"):
            continue
        for key in owner.rest.list_all("cloudkms", f"v1/{ring['name']}/cryptoKeys", "cryptoKeys"):
            if not owner.has_labels(key.get("labels")):
                continue
            for item in owner.rest.list_all("cloudkms", f"v1/{key['name']}/cryptoKeyVersions", "cryptoKeyVersions"):
                if item["state"] != "DESTROYED":
                    yield _key_version(owner, item)


def _key_version(owner: Owner, item: Item) -> Leftover:
    """Return one version of a key; one that is scheduled for destruction goes by itself."""
    path = str(item["name"])
    parts = path.split("/")
    location, ring, key, version = parts[3], parts[5], parts[7], parts[9]
    remove = shell(
        "gcloud kms keys versions destroy {version} --key {key} --keyring {ring} --location {location} "
        "--project {project} --quiet",
        version=version, key=key, ring=ring, location=location, project=owner.project,
    )  # fmt: skip
    is_scheduled = item["state"] == _SCHEDULED
    reason = f"Google Cloud destroys it at {utc(item.get('destroyTime'))}" if is_scheduled else ""
    price = None if reason else owner.prices["key"]["version"] / HOURS_PER_MONTH
    since = utc(item.get("createTime")) if isinstance(item, dict) else None
    return Leftover(
        "KMS key version", path, remove, since, price, kept=reason, aliases=(path.rpartition("/crypto")[0],)
    )


def _emails(owner: Owner) -> set[str]:
    """Return the addresses of the stack's service accounts, which follow from its name."""
    domain = f"{owner.project}.iam.gserviceaccount.com"
    return {f"{account_id(owner.settings, role)}@{domain}" for role in _ACCOUNTS}


def _accounts(owner: Owner) -> Iterator[Leftover]:
    path = f"v1/projects/{owner.project}/serviceAccounts"
    for item in owner.rest.list_all("iam", path, "accounts"):
        email = str(item["email"])
        if email in _emails(owner):
            template = "gcloud iam service-accounts delete {email} --project {project} --quiet"
            remove = shell(template, email=email, project=owner.project)
            yield Leftover("service account", email, remove, aliases=(str(item["name"]),))


def _bindings(owner: Owner) -> Iterator[Leftover]:
    """Yield the project's roles of deleted accounts of the stack, which IAM keeps with the prefix `deleted:`.

    https://cloud.google.com/iam/docs/troubleshoot-policies#deleted-principals
    """
    policy = owner.rest.post("cloudresourcemanager", f"v1/projects/{owner.project}:getIamPolicy")
    for binding in policy.get("bindings", ()):
        for member in binding["members"]:
            kind, _, email = str(member).partition("?")[0].rpartition(":")
            if kind == "deleted:serviceAccount" and email in _emails(owner):
                remove = shell(
                    "gcloud projects remove-iam-policy-binding {project} --member {member} --role {role} "
                    "--condition None --quiet",
                    project=owner.project, member=member, role=binding["role"],
                )  # fmt: skip
                yield Leftover("IAM binding", f"{binding['role']} of {email}", remove)


def _buckets(owner: Owner) -> Iterator[Leftover]:
    """Yield the buckets, which `storage.on_destroy keep` keeps with their checkpoints."""
    keep = "storage.on_destroy is keep" if owner.settings.storage.on_destroy == "keep" else ""
    for item in owner.rest.list_all("storage", "storage/v1/b", "items", project=owner.project):
        if owner.has_labels(item.get("labels")):
            name = str(item["name"])
            remove = shell("gcloud storage rm --recursive --all-versions {uri}", uri=f"gs://{name}")
            yield Leftover("bucket", name, remove, utc(item.get("timeCreated")), kept=keep, live="bucket")


def _name_and_location(path: str) -> tuple[str, str]:
    """Return the last part of `projects/P/locations/L/.../NAME`, and L."""
    parts = path.split("/")
    return parts[-1], parts[3]


def _delete(owner: Owner, group: str, name: str, option: str, place: str) -> str:
    """Return the command that deletes one resource of a group of commands."""
    template = f"gcloud {group} delete {{name}} --{option} {{place}} --project {{project}} --quiet"
    return shell(template, name=name, place=place, project=owner.project)
