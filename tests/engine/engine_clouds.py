"""The simulated clouds put together: rules of every type, answers to functions, remote components."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import grpc
import simulated_aws
import simulated_azure
import simulated_gcp
import simulated_kubernetes
from engine_provider import Construct, Invoke, Provider, Server
from engine_values import UNKNOWN, decode, encode, has_unknown, plain
from engine_world import Inputs, Rules, World
from provider_mocks import recording
from pulumi.runtime.proto import provider_pb2, resource_pb2, resource_pb2_grpc

_OUTPUTS, _CALLS = recording.cloud_tables()

_RULES: Mapping[str, Rules] = {**simulated_aws.RULES, **simulated_azure.RULES, **simulated_gcp.RULES}

#: An image is built again when it changes; another password for the registry is no change of the image.
_IMAGE = Rules(
    computed=lambda name, inputs: {
        "ref": f"{inputs['tags'][0].partition(':')[0]}@sha256:{'0123456789abcdef' * 4}",
        "digest": f"sha256:{'0123456789abcdef' * 4}",
    },
    ignored=("registries[0].password",),
)


def rules_of(token: str) -> Rules:
    """How a type behaves; what it answers comes from the imitations that the tests with mocks share."""
    if token.startswith("kubernetes:"):
        return simulated_kubernetes.rules_of(token, simulated_kubernetes.has_control_plane)
    rules = _IMAGE if token == "docker-build:index:Image" else _RULES.get(token, Rules())
    if token.startswith("azure-native:"):
        rules = replace(rules, identity=lambda name, inputs: simulated_azure.identity(token, name, inputs))
    imitated = _OUTPUTS.get(token)
    return replace(rules, computed=_both(imitated, rules)) if imitated else rules


def simulate() -> tuple[World, Server]:
    """An empty world and the provider in front of it."""
    world = World(rules_of)
    return world, Server(Provider(world, _invokes(), _CONSTRUCTS))


def _both(imitated: recording.Outputs, rules: Rules) -> recording.Outputs:
    own = rules.computed
    return lambda name, inputs: {**imitated(name, inputs), **own(name, inputs)}


def _invokes() -> dict[str, Invoke]:
    """The imitated functions; tokens that a cloud hands out are new at every call, as real ones are."""

    def answer(token: str) -> Invoke:
        return lambda world, arguments: _renewed(_CALLS[token](arguments))

    return {token: answer(token) for token in _CALLS}


#: Credentials in the answers of functions, by the imitations' keys, and what each begins with here.
CREDENTIALS = {"password": "ecr-password-", "authorizationToken": "ecr-token-", "accessToken": "ya29.token-"}


def _renewed(answer: Inputs) -> Inputs:
    fresh = {key: f"{start}{secrets.token_hex(12)}" for key, start in CREDENTIALS.items() if key in answer}
    return {**answer, **fresh}


class _Component:
    """A remote component being built: its registration and those of its children go to the engine's monitor."""

    def __init__(self, request: provider_pb2.ConstructRequest) -> None:
        channel = grpc.insecure_channel(request.monitorEndpoint, options=[("grpc.max_receive_message_length", 2**28)])
        self._monitor, self._request = resource_pb2_grpc.ResourceMonitorStub(channel), request
        answer = self._monitor.RegisterResource(
            resource_pb2.RegisterResourceRequest(
                type=request.type,
                name=request.name,
                parent=request.parent,
                custom=False,
                dependencies=request.dependencies,
                providers=request.providers,
                acceptSecrets=True,
            )
        )
        self.urn = answer.urn

    def child(
        self, package: str, token: str, name: str, inputs: Inputs, after: tuple[str, ...] = ()
    ) -> tuple[str, Any]:
        """Register a child resource; its URN and its outputs, unknown in a preview where they are computed."""
        answer = self._monitor.RegisterResource(
            resource_pb2.RegisterResourceRequest(
                type=token,
                name=name,
                parent=self.urn,
                custom=True,
                object=encode(inputs),
                provider=self._request.providers.get(package, ""),
                # As components do: without it the engine takes another default provider than for the program's own.
                version=version(f"pulumi-{package}"),
                dependencies=[*self._request.dependencies, *after],
                acceptSecrets=True,
                supportsPartialValues=True,
            )
        )
        return answer.urn, {**plain(decode(answer.object)), "id": answer.id or UNKNOWN}

    def done(self, outputs: Inputs) -> provider_pb2.ConstructResponse:
        """Register the component's outputs and answer them."""
        state = encode(outputs)
        self._monitor.RegisterResourceOutputs(resource_pb2.RegisterResourceOutputsRequest(urn=self.urn, outputs=state))
        return provider_pb2.ConstructResponse(urn=self.urn, state=state)


def _eks(world: World, request: provider_pb2.ConstructRequest) -> provider_pb2.ConstructResponse:
    """pulumi-eks: the role of the control plane, the control plane, and a kubeconfig without any token."""
    inputs, component = plain(decode(request.inputs)), _Component(request)
    role, made = component.child(
        "aws", "aws:iam/role:Role", f"{request.name}-eksRole", {"assumeRolePolicy": simulated_aws.trust()}
    )
    plane = simulated_aws.control_plane(inputs, made.get("arn", UNKNOWN))
    urn, cluster = component.child("aws", "aws:eks/cluster:Cluster", f"{request.name}-eksCluster", plane, (role,))
    outputs = _OUTPUTS["eks:index:Cluster"](request.name, inputs)
    if has_unknown(cluster) or request.dryRun:
        outputs = dict.fromkeys(outputs, UNKNOWN) if has_unknown(cluster) else outputs
    response = component.done(outputs)
    for key in outputs:
        response.stateDependencies[key].urns.append(urn)
    return response


def _kustomization(world: World, request: provider_pb2.ConstructRequest) -> provider_pb2.ConstructResponse:
    """The training operator v1: its namespace, its kinds and its controller, as its overlay `standalone` has them."""
    component, prefix = _Component(request), f"{request.name}:"
    labels = {"app.kubernetes.io/name": "training-operator"}
    space, _ = component.child(
        "kubernetes", "kubernetes:core/v1:Namespace", f"{prefix}kubeflow", {"metadata": {"name": "kubeflow"}}
    )
    names = {"kind": "PyTorchJob", "plural": "pytorchjobs", "singular": "pytorchjob", "listKind": "PyTorchJobList"}
    schema = {"openAPIV3Schema": {"type": "object"}}
    version = {"name": "v1", "served": True, "storage": True, "schema": schema}
    component.child(
        "kubernetes",
        "kubernetes:apiextensions.k8s.io/v1:CustomResourceDefinition",
        f"{prefix}pytorchjobs.kubeflow.org",
        {
            "metadata": {"name": "pytorchjobs.kubeflow.org"},
            "spec": {"group": "kubeflow.org", "names": names, "scope": "Namespaced", "versions": [version]},
        },
    )
    container = {"name": "training-operator", "image": "kubeflow/training-operator:v1.9.4"}
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    component.child(
        "kubernetes",
        "kubernetes:apps/v1:Deployment",
        f"{prefix}kubeflow/training-operator",
        {
            "metadata": {"name": "training-operator", "namespace": "kubeflow", "labels": labels},
            "spec": {"selector": {"matchLabels": labels}, "template": pod},
        },
        (space,),
    )
    return component.done({"resources": []})


#: How many resources each remote component makes.
COMPONENT_CHILDREN = {"eks:index:Cluster": 2, "kubernetes:kustomize/v2:Directory": 3}

_CONSTRUCTS: Mapping[str, Construct] = {
    "eks:index:Cluster": _eks,
    "kubernetes:kustomize/v2:Directory": _kustomization,
}
