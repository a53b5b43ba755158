"""Properties that the training's pods have with every launcher."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from workload_facts import CLOUDS, EVERYTHING, LAUNCHERS, facts, record_facts

from infra.contract import Fabric, Mount, Sidecar
from trainer.config import TrainConfig
from trainer.exit_codes import EXIT_RESTART
from workloads.manifests import build_manifests


def job_of(cloud: str, launcher: str = "job", **changes: Any) -> dict[str, Any]:
    """Return the object that contains the pod template: the job, or for a TrainJob its runtime."""
    job = {"launcher": launcher} | changes.pop("job", {})
    found = build_manifests(facts(cloud, job, **changes))
    return found["job-trainingruntime" if launcher == "trainjob" else "job"]


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    """Return the pod template of an object."""
    spec = job["spec"]
    if job["kind"] == "PyTorchJob":
        return spec["pytorchReplicaSpecs"]["Worker"]["template"]
    if job["kind"] == "TrainingRuntime":
        return spec["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    return spec["template"]


def main_container(pod: dict[str, Any]) -> dict[str, Any]:
    """Return the only container of a pod."""
    (container,) = pod["spec"]["containers"]
    return container


def env_of(container: dict[str, Any]) -> dict[str, str]:
    """Return the environment of a container."""
    return {item["name"]: item["value"] for item in container["env"]}


@pytest.mark.parametrize("cloud", CLOUDS)
def test_every_launcher_starts_the_same_pod(cloud: str) -> None:
    """Except for the container's name, the arguments of the rendezvous and the restart policy."""

    def common(launcher: str) -> dict[str, Any]:
        """Return what has to be equal."""
        pod = pod_of(job_of(cloud, launcher))
        main = {key: value for key, value in main_container(pod).items() if key not in {"name", "args"}}
        spec = {
            key: value for key, value in pod["spec"].items() if key not in {"containers", "restartPolicy", "subdomain"}
        }
        return {"metadata": pod["metadata"], "main": main, "spec": spec}

    first, *others = (common(launcher) for launcher in LAUNCHERS if launcher != "torchx")
    assert all(other == first for other in others)


@pytest.mark.parametrize(
    ("cloud", "limits"),
    [
        ("aws", {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "4", "hugepages-2Mi": "5120Mi"}),
        ("azure", {"nvidia.com/gpu": "8", "rdma/ib": "8"}),
        ("gcp", {"nvidia.com/gpu": "8"}),
    ],
)
def test_a_pod_requests_all_devices_of_its_node(cloud: str, limits: dict[str, str]) -> None:
    found = main_container(pod_of(job_of(cloud)))["resources"]["limits"]
    assert limits.items() <= found.items(), "without the fabric's device NCCL silently falls back to TCP"


def test_a_pod_with_huge_pages_also_requests_memory() -> None:
    assert "memory" in main_container(pod_of(job_of("aws")))["resources"]["limits"], "Kubernetes refuses it otherwise"


@pytest.mark.parametrize("cloud", ["aws", "azure", "gcp"])
def test_two_gpu_pods_never_share_a_node(cloud: str) -> None:
    pod = pod_of(job_of(cloud))
    (term,) = pod["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert term["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items(), "it must match itself"


def test_pods_without_gpus_may_share_a_laptops_one_node() -> None:
    affinity = pod_of(job_of("local"))["spec"]["affinity"]["podAntiAffinity"]
    assert set(affinity) == {"preferredDuringSchedulingIgnoredDuringExecution"}


@pytest.mark.parametrize("cloud", ["aws", "azure", "gcp"])
def test_the_pools_taint_is_tolerated_and_its_label_selected(cloud: str) -> None:
    spec = pod_of(job_of(cloud))["spec"]
    assert {"key": "nvidia.com/gpu", "operator": "Equal", "value": "present", "effect": "NoSchedule"} in spec[
        "tolerations"
    ]
    assert spec["nodeSelector"]["nvidia.com/gpu.present"] == "true"


def test_a_job_with_fewer_gpus_requests_fewer_and_starts_one_process_for_each() -> None:
    job = job_of("aws", job={"gpus_per_node": 4})
    container = main_container(pod_of(job))
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert "--nproc=4" in container["args"]


def _every_pod(cloud: str) -> list[dict[str, Any]]:
    """Return the pod templates of all launchers and companions."""
    found = []
    for launcher in LAUNCHERS:
        objects = build_manifests(
            facts(cloud, EVERYTHING | {"launcher": launcher}, queued=True, monitored=True)
        ).values()
        found += [
            pod_of(item) for item in objects if item["kind"] in {"Job", "PyTorchJob", "TrainingRuntime", "Deployment"}
        ]
    return found


@pytest.mark.parametrize("cloud", CLOUDS)
def test_every_pod_follows_the_restricted_pod_security_standard(cloud: str) -> None:
    """Level `restricted` of the Pod Security Standards, except for the fabric's capabilities, which need root."""
    fabric = facts(cloud).fabric
    allowed = set(fabric.capabilities)
    pods = _every_pod(cloud)
    assert len(pods) > 4
    for pod in pods:
        uses_fabric = "affinity" in pod["spec"]
        is_root = uses_fabric and fabric.as_root
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is not is_root
        assert pod["spec"]["securityContext"]["runAsUser"] == (0 if is_root else 10001)
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["spec"]["automountServiceAccountToken"] is False
        for container in pod["spec"]["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"]["drop"] == ["ALL"]
            assert set(security["capabilities"].get("add", [])) <= allowed
            assert "privileged" not in security


@pytest.mark.parametrize("cloud", CLOUDS)
def test_every_folder_that_the_trainer_writes_to_is_writable(cloud: str) -> None:
    here = facts(cloud)
    mounts = {item["mountPath"]: item for item in main_container(pod_of(job_of(cloud)))["volumeMounts"]}
    for path in ("/tmp", "/work", "/dev/shm", here.storage.work_path):
        assert not mounts[path].get("readOnly"), path
    assert here.config.metrics.dir is not None
    assert here.config.metrics.dir.startswith(here.storage.work_path + "/")


@pytest.mark.parametrize("cloud", CLOUDS)
def test_the_data_is_read_only(cloud: str) -> None:
    mounts = {item["mountPath"]: item for item in main_container(pod_of(job_of(cloud)))["volumeMounts"]}
    assert mounts[facts(cloud).storage.mount_path]["readOnly"] is True


def test_shared_memory_has_the_pools_size() -> None:
    volumes = {item["name"]: item for item in pod_of(job_of("gcp"))["spec"]["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": f"{facts('gcp').pool.shared_memory_gib}Gi"}


@pytest.mark.parametrize("cloud", CLOUDS)
def test_the_settings_in_the_config_map_are_the_trainers(cloud: str) -> None:
    found = build_manifests(facts(cloud))["config"]
    (text,) = found["data"].values()
    assert TrainConfig.model_validate_json(text) == facts(cloud).config, "the class that wrote the settings parses them"
    assert found["immutable"] is True


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_trainer_reads_the_config_map_that_is_mounted(launcher: str) -> None:
    pod = pod_of(job_of("aws", launcher))
    container = main_container(pod)
    volumes = {item["name"]: item for item in pod["spec"]["volumes"]}
    (mount,) = (item for item in container["volumeMounts"] if item["name"] == "config")
    config = build_manifests(facts("aws", {"launcher": launcher}))["config"]
    assert volumes["config"]["configMap"]["name"] == config["metadata"]["name"]
    path = container["args"][container["args"].index("--config") + 1]
    assert path == f"{mount['mountPath']}/{next(iter(config['data']))}"


def test_variables_of_the_job_override_those_of_the_fabric() -> None:
    before = env_of(main_container(pod_of(job_of("azure"))))
    after = env_of(main_container(pod_of(job_of("azure", job={"env": {"NCCL_SOCKET_IFNAME": "eth9"}}))))
    assert before["NCCL_SOCKET_IFNAME"] == "eth0"
    assert after == before | {"NCCL_SOCKET_IFNAME": "eth9"}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_replaced_pod_can_rejoin_the_rendezvous(launcher: str) -> None:
    assert env_of(main_container(pod_of(job_of("local", launcher))))["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


@pytest.mark.parametrize("cloud", CLOUDS)
def test_every_container_that_opens_the_bucket_has_the_identitys_variables(cloud: str) -> None:
    identity_env = facts(cloud).identity_env
    for pod in _every_pod(cloud):
        assert pod["spec"]["serviceAccountName"] == "trainer"
        for container in [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]:
            if "restartPolicy" not in container:
                assert identity_env.items() <= env_of(container).items()


def test_azures_pods_have_the_label_that_its_webhook_requires() -> None:
    assert pod_of(job_of("azure"))["metadata"]["labels"]["azure.workload.identity/use"] == "true"
    account = build_manifests(facts("azure"))["account"]
    assert "azure.workload.identity/client-id" in account["metadata"]["annotations"]


def test_a_secret_for_a_cluster_without_keyless_identity_becomes_variables() -> None:
    container = main_container(pod_of(job_of("local", secret_name="bucket-key")))
    assert container["envFrom"] == [{"secretRef": {"name": "bucket-key"}}]


TCPX = Fabric(
    name="tcpx",
    as_root=True,
    capabilities=("IPC_LOCK",),
    mounts=(Mount("socket", "/run/tcpx", read_only=False), Mount("libraries", "/usr/lib/tcpx", "/home/tcpx")),
    sidecars=(
        Sidecar(
            name="daemon",
            image="daemon@sha256:1",
            command=("/daemon",),
            capabilities=("NET_ADMIN",),
            mounts=(Mount("socket", "/run/tcpx", read_only=False), Mount("host-sys", "/hostsysfs", "/sys")),
        ),
    ),
)


def test_a_fabrics_sidecar_runs_as_root_before_the_trainer_and_ends_with_it() -> None:
    spec = pod_of(job_of("gcp", fabric=TCPX))["spec"]
    (daemon,) = spec["initContainers"]
    assert daemon["restartPolicy"] == "Always", "with an ordinary container the pod would never complete"
    assert daemon["securityContext"]["runAsUser"] == 0
    assert daemon["securityContext"]["capabilities"]["add"] == ["NET_ADMIN"]
    assert daemon["securityContext"]["privileged"] is False


def test_the_trainer_and_a_sidecar_share_the_volume_that_both_name() -> None:
    spec = pod_of(job_of("gcp", fabric=TCPX))["spec"]
    names = [item["name"] for item in spec["volumes"]]
    assert len(names) == len(set(names))
    mounted = [mount["name"] for one in [*spec["containers"], *spec["initContainers"]] for mount in one["volumeMounts"]]
    assert mounted.count("socket") == 2
    assert {"name": "socket", "emptyDir": {"medium": "Memory"}} in spec["volumes"]


def test_the_trainer_ends_before_the_grace_period() -> None:
    grace = pod_of(job_of("local"))["spec"]["terminationGracePeriodSeconds"]
    assert facts("local").config.fault.grace_seconds < grace, "the trainer ends itself before Kubernetes kills it"


@pytest.mark.parametrize(("overrides", "notices"), [({"gpu.capacity": "spot"}, "auto"), ({}, "off")])
def test_spot_interruption_notices_are_watched_on_spot_nodes(overrides: dict[str, Any], notices: str) -> None:
    assert record_facts("aws", tuple(overrides.items())).config.fault.notices == notices


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_changed_setting_changes_the_name_of_the_job(launcher: str) -> None:
    def name(**changes: Any) -> str:
        """Return the name of the job with other settings."""
        return build_manifests(facts("local", {"launcher": launcher, **changes}))["job"]["metadata"]["name"]

    assert name() == name()
    assert name(env={"A": "1"}) != name()
    assert re.fullmatch(r"default-[0-9a-f]{8}", name())


def test_a_changed_trainer_setting_replaces_only_the_config_map_and_the_job() -> None:
    here = facts("local")
    other = replace(
        here, config=here.config.model_copy(update={"data": here.config.data.model_copy(update={"seed": 9})})
    )
    assert build_manifests(here)["job"]["metadata"]["name"] != build_manifests(other)["job"]["metadata"]["name"]
    unchanged = {key for key, item in build_manifests(here).items() if build_manifests(other)[key] == item}
    assert set(build_manifests(here)) - unchanged == {"config", "job"}, "nothing else is replaced"


def test_the_longest_names_of_pods_are_valid_in_dns() -> None:
    run = "r" * 36
    for launcher, suffix in (("job", "-999"), ("pytorchjob", "-worker-999"), ("trainjob", "-node-0-999-abcde")):
        name = build_manifests(facts("local", {"launcher": launcher, "run": run}))["job"]["metadata"]["name"]
        assert len(name + suffix) <= 63, f"{launcher}: the API server would refuse the pods"


def test_the_host_of_the_rendezvous_is_the_pod_of_index_0() -> None:
    found = build_manifests(facts("local"))
    name, service = found["job"]["metadata"]["name"], found["job-service"]["metadata"]["name"]
    pod = pod_of(found["job"])
    assert f"--rdzv-endpoint={name}-0.{service}:29400" in main_container(pod)["args"]
    assert pod["spec"]["subdomain"] == service
    assert found["job-service"]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert found["job-service"]["spec"]["publishNotReadyAddresses"] is True, (
        "the rendezvous needs the names before the pods are ready"
    )


def test_disruptions_are_not_failures_and_mistakes_end_the_job() -> None:
    spec = job_of("local")["spec"]
    first, second, third = spec["podFailurePolicy"]["rules"]
    assert (first["action"], first["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    assert (second["action"], second["onExitCodes"]["values"]) == ("Ignore", [EXIT_RESTART])
    assert (third["action"], third["onExitCodes"]["values"]) == ("FailJob", [2])
    for rule in (second, third):
        assert rule["onExitCodes"]["containerName"] == main_container(pod_of(job_of("local")))["name"]
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "a pod failure policy requires it"


def test_an_elastic_job_has_a_minimum_and_a_maximum_of_nodes() -> None:
    wide = {"nodes": 4, "min_nodes": 2}
    assert "--nnodes=2:4" in main_container(pod_of(job_of("local", job=wide)))["args"]
    policy = job_of("local", "pytorchjob", job=wide)["spec"]["elasticPolicy"]
    assert (policy["minReplicas"], policy["maxReplicas"], policy["rdzvBackend"]) == (2, 4, "c10d")
    assert build_manifests(facts("local", wide))["budget"]["spec"]["minAvailable"] == 2


@pytest.mark.parametrize("launcher", ["job", "pytorchjob", "trainjob"])
def test_a_planned_drain_evicts_pods_and_the_autoscaler_does_not(launcher: str) -> None:
    found = build_manifests(facts("local", {"launcher": launcher}))
    assert "budget" not in found, "without one pod the others only wait, so a budget would only outlast the drain"
    annotations = pod_of(job_of("local", launcher))["metadata"]["annotations"]
    assert annotations["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"


def test_a_pytorchjob_has_the_names_that_its_operator_requires() -> None:
    job = job_of("aws", "pytorchjob")
    assert main_container(pod_of(job))["name"] == "pytorch", "the operator's webhook denies other names"
    assert job["spec"]["nprocPerNode"] == "8", "unset means one process on a node with eight GPUs"


def test_a_trainjob_has_the_names_that_its_operator_requires() -> None:
    runtime = job_of("aws", "trainjob")
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["name"] == "node"
    assert main_container(pod_of(runtime))["name"] == "node"
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    job = build_manifests(facts("aws", {"launcher": "trainjob"}))["job"]
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["spec"]["trainer"] == {"numNodes": 2, "numProcPerNode": 8}


def test_pulumi_does_not_wait_for_a_training() -> None:
    for launcher in LAUNCHERS:
        job = build_manifests(facts("aws", {"launcher": launcher}))["job"]
        assert job["metadata"]["annotations"]["pulumi.com/skipAwait"] == "true"


def test_the_queue_of_a_queued_job_covers_all_resources_that_it_requests() -> None:
    for cloud in ("aws", "azure", "gcp"):
        found = build_manifests(facts(cloud, {"launcher": "pytorchjob"}, queued=True))
        queue = found["job"]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
        assert queue == found["queue-localqueue"]["metadata"]["name"]
        cluster_queue = found["queue-clusterqueue"]
        assert found["queue-localqueue"]["spec"]["clusterQueue"] == cluster_queue["metadata"]["name"]
        (group,) = cluster_queue["spec"]["resourceGroups"]
        requested = main_container(pod_of(found["job"]))["resources"]["limits"]
        assert set(requested) <= set(group["coveredResources"]), "Kueue admits no resource without a quota"
        (flavor,) = group["flavors"]
        assert flavor["name"] == found["queue-resourceflavor"]["metadata"]["name"]
        assert [item["name"] for item in flavor["resources"]] == group["coveredResources"]


def test_without_kueue_nothing_is_queued() -> None:
    found = build_manifests(facts("aws"))
    assert "kueue" not in json.dumps(found)


def test_the_netcheck_has_the_image_the_nodes_and_the_devices_of_the_training() -> None:
    here = facts("aws", EVERYTHING)
    found = build_manifests(here)["netcheck"]
    container = main_container(pod_of(found))
    assert container["image"] == here.image
    assert found["spec"]["parallelism"] == 2
    assert container["resources"] == main_container(pod_of(job_of("aws")))["resources"]
    assert container["args"][-3:] == ["netcheck", "--min-gb-per-s=40", "--expect-log=NET/OFI Selected provider is efa"]
    assert "pulumi.com/skipAwait" not in found["metadata"].get("annotations", {}), "Pulumi waits for a gate"


@pytest.mark.parametrize(
    ("cloud", "job", "measured"),
    [
        ("aws", {}, True),
        ("azure", {}, True),
        ("gcp", {}, False),
        ("local", {}, False),
        ("aws", {"nodes": 1}, False),
        ("aws", {"min_nodes": 1}, False),
        ("aws", {"netcheck": {"enabled": False}}, False),
        ("gcp", {"netcheck": {"enabled": True}}, True),
        ("aws", {"nodes": 1, "netcheck": {"enabled": True}}, True),
    ],
)
def test_the_fabric_is_measured_by_default_with_rdma_on_a_fixed_set_of_nodes(
    cloud: str, job: dict[str, Any], measured: bool
) -> None:
    assert ("netcheck" in build_manifests(facts(cloud, job))) is measured


@pytest.mark.parametrize("step", ["dataset", "netcheck"])
def test_pulumi_repeats_a_failed_job_that_it_waits_for(step: str) -> None:
    found = build_manifests(facts("aws", EVERYTHING))[step]
    assert found["metadata"]["annotations"] == {"pulumi.com/replaceUnready": "true"}, (
        "the next `up` would wait for the failed Job"
    )


def test_pulumi_does_not_wait_for_a_netcheck_without_a_gate() -> None:
    found = build_manifests(facts("aws", {"netcheck": {"enabled": True, "gate": False}}))["netcheck"]
    assert found["metadata"]["annotations"] == {"pulumi.com/skipAwait": "true"}


def test_the_dataset_is_fetched_then_preprocessed_on_nodes_without_gpus() -> None:
    found = build_manifests(facts("gcp", EVERYTHING))["dataset"]
    spec = pod_of(found)["spec"]
    assert "nvidia.com/gpu" not in json.dumps(found), "GPUs would idle while files are copied"
    assert "tolerations" not in spec
    (fetch,), (preprocess,) = spec["initContainers"], spec["containers"]
    raw = f"{facts('gcp').storage.work_path}/criteo.raw"
    assert fetch["args"] == ["fetch", f"--from={facts('gcp').bucket_uri}/datasets", f"--to={raw}"]
    assert preprocess["args"][:3] == ["preprocess", f"--input={raw}", f"--output={raw.removesuffix('.raw')}"]
    assert preprocess["args"][-1] == "--ids=hash"


def test_a_dataset_on_the_shared_storage_is_not_fetched() -> None:
    spec = pod_of(build_manifests(facts("aws", EVERYTHING))["dataset"])["spec"]
    assert "initContainers" not in spec, "FSx shows the bucket's folder; copying it into itself would never end"
    assert "--input=/data/datasets" in spec["containers"][0]["args"]


def test_a_dataset_can_be_fetched_without_preprocessing() -> None:
    found = build_manifests(facts("gcp", {"dataset": {"source": "s3://other/npy", "preprocess": False}}))["dataset"]
    (container,) = pod_of(found)["spec"]["containers"]
    assert container["args"] == ["fetch", "--from=s3://other/npy", f"--to={facts('gcp').storage.work_path}/criteo"]


def test_preprocessing_uses_half_of_its_memory_limit() -> None:
    found = build_manifests(facts("gcp", {"dataset": {"source": "bucket", "memory_gib": 8}}))["dataset"]
    (container,) = pod_of(found)["spec"]["containers"]
    assert container["resources"]["limits"]["memory"] == "8192Mi"
    assert "--memory-gib=4" in container["args"]


@pytest.mark.parametrize("cloud", CLOUDS)
def test_the_network_policy_lists_the_allowed_destinations(cloud: str) -> None:
    policy = build_manifests(facts(cloud, {"egress": ["10.1.2.3/32:9000"]}))["network-policy"]["spec"]
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    anywhere = [rule for rule in policy["egress"] if {"ipBlock": {"cidr": "0.0.0.0/0"}} in rule.get("to", [])]
    assert [rule["ports"] for rule in anywhere] == [[{"protocol": "TCP", "port": 443}]], (
        "only HTTPS is open to all addresses"
    )
    unbounded = [rule for rule in policy["egress"] if "to" not in rule]
    assert [port["port"] for rule in unbounded for port in rule["ports"]] == [53, 53], "and DNS over UDP and TCP"
    own = {rule["to"][0]["ipBlock"]["cidr"] for rule in policy["egress"] if "ipBlock" in rule.get("to", [{}])[0]}
    assert "10.1.2.3/32" in own
    assert {entry.rpartition(":")[0] for entry in facts(cloud).identity_endpoints} <= own, (
        "the pods would get no credentials"
    )


def test_the_network_policy_selects_every_pod_of_the_stack() -> None:
    selected = build_manifests(facts("aws"))["network-policy"]["spec"]["podSelector"]["matchLabels"]
    for pod in _every_pod("aws"):
        assert selected.items() <= pod["metadata"]["labels"].items()


def test_the_quota_equals_the_largest_pool() -> None:
    hard = build_manifests(facts("aws"))["quota"]["spec"]["hard"]
    assert hard["requests.nvidia.com/gpu"] == "16"
    assert (hard["services.loadbalancers"], hard["services.nodeports"]) == ("0", "0")


def test_prometheus_scrapes_the_port_of_the_trainer() -> None:
    found = build_manifests(facts("aws", monitored=True))
    (endpoint,) = found["monitor"]["spec"]["podMetricsEndpoints"]
    container = main_container(pod_of(found["job"]))
    (port,) = (item for item in container["ports"] if item["name"] == endpoint["port"])
    assert port["containerPort"] == facts("aws").config.metrics.prometheus_port
    assert facts("aws").config.metrics.prometheus_host == "0.0.0.0"
    selected = found["monitor"]["spec"]["selector"]["matchLabels"]
    assert selected.items() <= pod_of(found["job"])["metadata"]["labels"].items()


def test_a_cluster_without_prometheus_gets_no_pod_monitor() -> None:
    assert "monitor" not in build_manifests(facts("local", monitored=False))


def test_tensorboard_reads_the_folder_that_the_trainer_writes() -> None:
    container = main_container(pod_of(build_manifests(facts("aws"))["tensorboard-deployment"]))
    assert f"--logdir={facts('aws').config.metrics.dir}" in container["args"]
    assert all(mount.get("readOnly") for mount in container["volumeMounts"] if mount["name"] == "data")


def test_tensorboard_can_be_disabled() -> None:
    assert not [
        key for key in build_manifests(facts("aws", {"tensorboard": {"enabled": False}})) if "tensorboard" in key
    ]
