"""The combined simulated clouds: rules of every resource type, function results, remote components."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import grpc
import simulated_aks
import simulated_autoscaler
import simulated_aws
import simulated_azure
import simulated_capacity
import simulated_drains
import simulated_gcp
import simulated_kubernetes
import simulated_minutes
import simulated_registry
from engine_provider import Construct, Invoke, Provider, Server
from engine_values import UNKNOWN, decode, encode, has_unknown, plain
from engine_world import Inputs, Rules, World
from provider_mocks import recording
from pulumi.runtime.proto import provider_pb2, resource_pb2, resource_pb2_grpc

_OUTPUTS, _CALLS = recording.cloud_tables()

_RULES: Mapping[str, Rules] = {
    **simulated_aws.RULES,
    **simulated_azure.RULES,
    **simulated_gcp.RULES,
    **simulated_registry.RULES,
}


def rules_of(token: str) -> Rules:
    """Return how a type behaves; its outputs come from the mocks' tables."""
    rules = simulated_minutes.with_minutes(token, _rules_of(token))
    return simulated_drains.with_drains(token, simulated_capacity.with_capacity(token, rules))


def _rules_of(token: str) -> Rules:
    if token.startswith("kubernetes:"):
        return simulated_kubernetes.rules_of(token, simulated_kubernetes.has_control_plane)
    rules = _RULES.get(token, Rules())
    if token.startswith("azure-native:"):
        rules = replace(rules, identity=lambda name, inputs: simulated_azure.identity(token, name, inputs))
    mocked = _OUTPUTS.get(token)
    return replace(rules, computed=_combine(mocked, rules)) if mocked else rules


def simulate() -> tuple[World, Server]:
    """Return an empty world and the provider that serves it."""
    world = World(rules_of)
    simulated_autoscaler.start(world)
    return world, Server(Provider(world, _invokes(), _CONSTRUCTS))


def _combine(mocked: recording.Outputs, rules: Rules) -> recording.Outputs:
    own = rules.computed
    return lambda name, inputs: {**mocked(name, inputs), **own(name, inputs)}


def _invokes() -> dict[str, Invoke]:
    """Return the mocked functions; like the real ones, they issue a new token at every call."""

    def invoke(token: str) -> Invoke:
        return lambda world, arguments: _with_new_credentials(_CALLS[token](arguments))

    return {token: invoke(token) for token in _CALLS} | dict(simulated_aws.CALLS) | dict(simulated_aks.CALLS)


#: Credentials in function results, by their keys in the mocks, and the prefix of each.
CREDENTIALS = {
    "password": "ecr-password-",
    "authorizationToken": "ecr-token-",
    "accessToken": "ya29.token-",
    "token": "entra-token-",
}


def _with_new_credentials(result: Inputs) -> Inputs:
    fresh = {key: f"{start}{secrets.token_hex(12)}" for key, start in CREDENTIALS.items() if key in result}
    return {**result, **fresh}


class _Component:
    """A remote component under construction; it registers itself and its children with the engine's monitor."""

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
        """Register a child resource; return its URN and outputs. In a preview, computed outputs are unknown."""
        answer = self._monitor.RegisterResource(
            resource_pb2.RegisterResourceRequest(
                type=token,
                name=name,
                parent=self.urn,
                custom=True,
                object=encode(inputs),
                provider=self._request.providers.get(package, ""),
                # Without a version the engine would use another default provider than the program does.
                version=version(f"pulumi-{package}"),
                dependencies=[*self._request.dependencies, *after],
                acceptSecrets=True,
                supportsPartialValues=True,
            )
        )
        return answer.urn, {**plain(decode(answer.object)), "id": answer.id or UNKNOWN}

    def finish(self, outputs: Inputs) -> provider_pb2.ConstructResponse:
        """Register the component's outputs and return the response."""
        state = encode(outputs)
        self._monitor.RegisterResourceOutputs(resource_pb2.RegisterResourceOutputsRequest(urn=self.urn, outputs=state))
        return provider_pb2.ConstructResponse(urn=self.urn, state=state)


def _eks(world: World, request: provider_pb2.ConstructRequest) -> provider_pb2.ConstructResponse:
    """Build the component of pulumi-eks: control plane, its role, and a kubeconfig without a token."""
    inputs, component = plain(decode(request.inputs)), _Component(request)
    role, role_outputs = component.child(
        "aws", "aws:iam/role:Role", f"{request.name}-eksRole", {"assumeRolePolicy": simulated_aws.trust_policy()}
    )
    plane = simulated_aws.control_plane(inputs, role_outputs.get("arn", UNKNOWN))
    urn, cluster = component.child("aws", "aws:eks/cluster:Cluster", f"{request.name}-eksCluster", plane, (role,))
    outputs = _with_authority(_OUTPUTS["eks:index:Cluster"](request.name, inputs), world.authority)
    if has_unknown(cluster) or request.dryRun:
        outputs = dict.fromkeys(outputs, UNKNOWN) if has_unknown(cluster) else outputs
    response = component.finish(outputs)
    for key in outputs:
        response.stateDependencies[key].urns.append(urn)
    return response


def _with_authority(outputs: Inputs, authority: str) -> Inputs:
    """Put the authority of the API server's certificate into the kubeconfig, if there is a server."""
    if not authority:
        return outputs
    document = json.loads(outputs["kubeconfigJson"])
    document["clusters"][0]["cluster"]["certificate-authority-data"] = authority
    return {**outputs, "kubeconfig": document, "kubeconfigJson": json.dumps(document)}


def _kustomization(world: World, request: provider_pb2.ConstructRequest) -> provider_pb2.ConstructResponse:
    """Build the overlay `standalone` of the training operator v1: namespace, CRDs and controller."""
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
    return component.finish({"resources": []})


#: The number of resources that each remote component creates.
NUM_COMPONENT_CHILDREN = {"eks:index:Cluster": 2, "kubernetes:kustomize/v2:Directory": 3}

_CONSTRUCTS: Mapping[str, Construct] = {
    "eks:index:Cluster": _eks,
    "kubernetes:kustomize/v2:Directory": _kustomization,
}
