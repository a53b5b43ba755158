"""Installs one chart: its namespace, the release, and the custom resources that configure it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pulumi
import pulumi_kubernetes as k8s
from pulumi_kubernetes.helm.v3 import Release, RepositoryOptsArgs
from pulumi_kubernetes.kustomize.v2 import Directory

from infra.addons import charts
from infra.contract import ChartRequest, CustomResource

#: Helm's wait for a release, in seconds: a first pull of the driver images takes minutes.
_TIMEOUT_SECONDS = 900


class Operator(pulumi.ComponentResource):
    """One chart with its namespace and custom resources.

    They are created in the order namespace, release, custom resources and destroyed in reverse, so that the operator
    can still run the finalizers of its own kinds. A dependent must wait for `ready`.
    """

    ready: Sequence[pulumi.Resource]

    def __init__(
        self,
        name: str,
        request: ChartRequest,
        labels: Mapping[str, str],
        opts: pulumi.ResourceOptions,
        namespace: k8s.core.v1.Namespace | None = None,
    ) -> None:
        super().__init__("torchrec-cloud:addons:Operator", name, {"chart": request.key}, opts)
        chart = charts.table()[request.key]
        if namespace is None and chart.namespace_level is not None:
            namespace = _create_namespace(name, chart, labels, pulumi.ResourceOptions(parent=self))
        before = [namespace] if namespace else []
        release = _install(name, chart, request, pulumi.ResourceOptions(parent=self, depends_on=before))
        after = pulumi.ResourceOptions(parent=self, depends_on=[release])
        own = [_create_custom_resource(f"{name}-{item.name}", item, after) for item in request.resources]
        self.namespace = namespace
        self.ready = (release, *own)
        self.register_outputs({"version": chart.version})


def _create_namespace(
    name: str, chart: charts.Chart, labels: Mapping[str, str], opts: pulumi.ResourceOptions
) -> k8s.core.v1.Namespace:
    """Create the chart's namespace; one that Helm creates would remain after an uninstall."""
    security = {"pod-security.kubernetes.io/enforce": str(chart.namespace_level)}
    metadata = k8s.meta.v1.ObjectMetaArgs(name=chart.namespace, labels=dict(labels) | security)
    return k8s.core.v1.Namespace(f"{name}-namespace", metadata=metadata, opts=opts)


def _install(
    name: str, chart: charts.Chart, request: ChartRequest, opts: pulumi.ResourceOptions
) -> Release | Directory:
    """Install the Helm release, or the kustomization of a project without a chart.

    A Release runs Helm's own hooks and uninstall, which the operators' CRD hooks rely on. The training operator v1 is
    published only as a kustomization and is applied from its repository at a fixed commit, because its CRDs are
    thousands of generated lines. A job that depends on the component depends on all its children, so it is destroyed
    first.
    """
    if chart.kind == "kustomize":
        assert not request.values, f"{chart.key} is a kustomization and takes no values"
        return Directory(name, directory=chart.reference, opts=opts)
    return Release(
        name,
        name=chart.key,
        chart=chart.reference,
        version=chart.version,
        namespace=chart.namespace,
        repository_opts=RepositoryOptsArgs(repo=chart.source) if chart.kind == "chart" else None,
        values=request.values,
        timeout=_TIMEOUT_SECONDS,
        opts=opts,
    )


def _create_custom_resource(name: str, item: CustomResource, opts: pulumi.ResourceOptions) -> pulumi.Resource:
    return k8s.apiextensions.CustomResource(
        name,
        api_version=item.api_version,
        kind=item.kind,
        metadata=k8s.meta.v1.ObjectMetaArgs(name=item.name, namespace=item.namespace),
        spec=item.spec,
        opts=opts,
    )
