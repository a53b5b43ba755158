"""One gRPC server that replaces the plugin of every provider; `World` holds the clouds themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
from engine_configs import kubernetes_change
from engine_values import UNKNOWN, at, decode, differences, encode, has_unknown, plain
from engine_world import Change, ConnectionLost, Inputs, PartlyCreated, Refused, Resource, World
from google.protobuf import any_pb2, empty_pb2
from google.rpc import status_pb2
from grpc_status import rpc_status
from pulumi.runtime.proto import plugin_pb2, provider_pb2, provider_pb2_grpc

Invoke = Callable[[World, Inputs], Inputs]
Construct = Callable[[World, provider_pb2.ConstructRequest], provider_pb2.ConstructResponse]

#: The providers that these stacks use.
PROVIDERS = ("aws", "azure-native", "gcp", "eks", "kubernetes", "docker-build")


#: Providers that pulumi-terraform-bridge makes of Terraform's.
_BRIDGED = ("aws:", "gcp:")


class Provider(provider_pb2_grpc.ResourceProviderServicer):
    """A provider backed by a world; `invokes` and `constructs` are functions and remote components by token."""

    def __init__(self, world: World, invokes: Mapping[str, Invoke], constructs: Mapping[str, Construct]) -> None:
        self._world, self._invokes, self._constructs = world, invokes, constructs
        self.on_connection_lost: Callable[[], None] = lambda: None

    def interrupt(self) -> None:
        """End the operations that wait for their time to pass."""
        self._world.clock.interrupt()

    def Handshake(self, request: Any, context: Any) -> provider_pb2.ProviderHandshakeResponse:
        return provider_pb2.ProviderHandshakeResponse(accept_secrets=True, accept_resources=True, accept_outputs=False)

    def Attach(self, request: Any, context: Any) -> empty_pb2.Empty:
        return empty_pb2.Empty()

    def Cancel(self, request: Any, context: Any) -> empty_pb2.Empty:
        return empty_pb2.Empty()

    def GetPluginInfo(self, request: Any, context: Any) -> plugin_pb2.PluginInfo:
        return plugin_pb2.PluginInfo(version="99.0.0")

    def GetSchema(self, request: Any, context: Any) -> provider_pb2.GetSchemaResponse:
        return provider_pb2.GetSchemaResponse(schema="{}")

    def GetMapping(self, request: Any, context: Any) -> provider_pb2.GetMappingResponse:
        return provider_pb2.GetMappingResponse()

    def GetMappings(self, request: Any, context: Any) -> provider_pb2.GetMappingsResponse:
        return provider_pb2.GetMappingsResponse()

    def CheckConfig(self, request: Any, context: Any) -> provider_pb2.CheckResponse:
        return provider_pb2.CheckResponse(inputs=request.news)

    def DiffConfig(self, request: Any, context: Any) -> provider_pb2.DiffResponse:
        old, new = plain(decode(request.olds)), plain(decode(request.news))
        if _token(request.urn) == "pulumi:providers:kubernetes":
            return _diff_response(kubernetes_change(old, new))
        return _diff_response(Change(tuple(differences(old, new)), ()))

    def Configure(self, request: Any, context: Any) -> provider_pb2.ConfigureResponse:
        kubeconfig = plain(decode(request.args)).get("kubeconfig")
        if kubeconfig:
            self._world.kubeconfig = kubeconfig
        return provider_pb2.ConfigureResponse(
            acceptSecrets=True, supportsPreview=True, acceptResources=True, acceptOutputs=False
        )

    def Check(self, request: Any, context: Any) -> provider_pb2.CheckResponse:
        """Check the inputs and, like the real provider, fill in generated names so that they stay the same."""
        token, news = _token(request.urn), decode(request.news)
        failures = [
            provider_pb2.CheckFailure(property=path, reason=reason)
            for path, reason in self._world.check(token, plain(news), _name(request.urn))
        ]
        old = plain(decode(request.olds))
        return provider_pb2.CheckResponse(
            inputs=encode(self._with_name(token, request.urn, old, news)), failures=failures
        )

    def Diff(self, request: Any, context: Any) -> provider_pb2.DiffResponse:
        old, new = plain(decode(request.old_inputs)), plain(decode(request.news))
        return _diff_response(self._world.diff(_token(request.urn), old, new, request.id))

    def Create(self, request: Any, context: Any) -> provider_pb2.CreateResponse:
        inputs = decode(request.properties)
        if request.preview:
            planned = self._world.plan(_token(request.urn), _name(request.urn), plain(inputs))
            return provider_pb2.CreateResponse(properties=encode({**inputs, **planned}))
        with self._report_errors(context, inputs):
            resource = self._world.create(_token(request.urn), _name(request.urn), plain(inputs))
            return provider_pb2.CreateResponse(id=resource.id, properties=encode({**inputs, **resource.computed}))
        raise AssertionError("aborted above")

    def Update(self, request: Any, context: Any) -> provider_pb2.UpdateResponse:
        inputs = decode(request.news)
        if request.preview:
            planned = self._world.plan_update(_token(request.urn), request.id, plain(inputs))
            return provider_pb2.UpdateResponse(properties=encode({**inputs, **planned}))
        token = _token(request.urn)
        olds, known = plain(decode(request.olds)), plain(decode(request.old_inputs))
        if token.startswith(_BRIDGED) and known.keys() <= inputs.keys() and {**olds, **plain(inputs)} == olds:
            # After a failed create or update. `diff == nil` in pulumi-terraform-bridge, pkg/tfbridge/provider.go, which
            # compares with the outputs in the state: the cloud is not asked.
            return provider_pb2.UpdateResponse(properties=request.olds)
        with self._report_errors(context, inputs):
            resource = self._update(token, request.id, plain(inputs))
            return provider_pb2.UpdateResponse(properties=encode({**inputs, **resource.computed}))
        raise AssertionError("aborted above")

    def _update(self, token: str, identifier: str, inputs: Inputs) -> Resource:
        """Update a resource; a bridged provider keeps the new inputs in the state, also those of a refused update.

        Update in pkg/tfbridge/provider.go returns `initializationError` with the planned state.
        """
        try:
            return self._world.update(token, identifier, inputs)
        except Refused as refusal:
            resource = self._world.find(token, identifier)
            if resource is None or not token.startswith(_BRIDGED):
                raise
            failure = PartlyCreated(str(refusal))
            failure.resource = resource
            raise failure from None

    def Read(self, request: Any, context: Any) -> provider_pb2.ReadResponse:
        """Return the resource as it is now; unchanged values stay secret if the engine holds them as secrets."""
        resource = self._world.find(_token(request.urn), request.id)
        if resource is None:
            return provider_pb2.ReadResponse()
        known = decode(request.inputs)
        inputs = {
            key: known[key] if plain(known.get(key)) == value else value for key, value in resource.inputs.items()
        }
        return provider_pb2.ReadResponse(
            id=resource.id, inputs=encode(inputs), properties=encode({**inputs, **resource.computed})
        )

    def Delete(self, request: Any, context: Any) -> empty_pb2.Empty:
        with self._report_errors(context):
            self._world.delete(_token(request.urn), request.id)
        return empty_pb2.Empty()

    def Invoke(self, request: Any, context: Any) -> provider_pb2.InvokeResponse:
        arguments = plain(decode(request.args))
        invoke = self._invokes.get(request.tok)
        if invoke is None:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, f"no simulated function {request.tok}")
        assert invoke
        self._world.calls[request.tok] += 1
        if has_unknown(arguments):
            return provider_pb2.InvokeResponse()
        return provider_pb2.InvokeResponse(**{"return": encode(invoke(self._world, arguments))})

    def Construct(self, request: Any, context: Any) -> provider_pb2.ConstructResponse:
        build = self._constructs.get(request.type)
        if build is None:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, f"no simulated component {request.type}")
        assert build
        failures = self._world.check(request.type, plain(decode(request.inputs)))
        if failures:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{request.type} {request.name}: {failures}")
        return build(self._world, request)

    def _with_name(self, token: str, urn: str, old: Inputs, news: Inputs) -> Inputs:
        """Give an unnamed Kubernetes object a permanent name that ends in hexadecimal digits."""
        metadata = news.get("metadata")
        if not token.startswith("kubernetes:") or not isinstance(metadata, dict) or metadata.get("name"):
            return news
        name = at(old, "metadata.name") or f"{_name(urn)}-{self._world.next_suffix()}"
        return {**news, "metadata": {**metadata, "name": name}}

    @contextmanager
    def _report_errors(self, context: Any, inputs: Inputs | None = None) -> Iterator[None]:
        """Report a refused request as an error; stop the whole server on a lost connection."""
        try:
            yield
        except PartlyCreated as failure:
            context.abort_with_status(rpc_status.to_status(_init_failed(failure, inputs or {})))
        except Refused as refusal:
            context.abort(grpc.StatusCode.UNKNOWN, str(refusal))
        except ConnectionLost:
            self.on_connection_lost()
            context.abort(grpc.StatusCode.UNAVAILABLE, "the provider closed the connection")


class Server:
    """The provider on a loopback port; after `kill`, `start` reuses the world and the port."""

    def __init__(self, provider: Provider) -> None:
        self._provider, self.port = provider, 0
        self._provider.on_connection_lost = lambda: threading.Thread(target=self.kill).start()
        self.killed = threading.Event()
        self.start()

    @property
    def environment(self) -> dict[str, str]:
        """The variables that make the engine attach to this server instead of downloading plugins."""
        return {"PULUMI_DEBUG_PROVIDERS": ",".join(f"{name}:{self.port}" for name in PROVIDERS)}

    def start(self) -> None:
        """Start to serve, on the previous port if there was one."""
        self.killed.clear()
        # Each component occupies a thread while it waits for its children.
        self._server = grpc.server(
            futures.ThreadPoolExecutor(max_workers=128), options=[("grpc.max_receive_message_length", 2**28)]
        )
        provider_pb2_grpc.add_ResourceProviderServicer_to_server(self._provider, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()

    def kill(self) -> None:
        """Stop without finishing the pending requests."""
        self._provider.interrupt()
        self._server.stop(None).wait()
        self.killed.set()


def _init_failed(failure: PartlyCreated, inputs: Inputs) -> status_pb2.Status:
    """Return the error of a create that left an object behind: the engine keeps it with the reasons.

    As `initializationError` in pulumi-terraform-bridge, pkg/tfbridge/provider.go: the next `up` sends an update, even
    without a difference.
    """
    resource = failure.resource
    assert resource, "raise PartlyCreated only in on_created and on_updated"
    detail = any_pb2.Any()
    detail.Pack(
        provider_pb2.ErrorResourceInitFailed(
            id=resource.id,
            properties=encode({**inputs, **resource.computed}),
            reasons=[str(failure)],
            inputs=encode(inputs),
        )
    )
    return status_pb2.Status(code=grpc.StatusCode.UNKNOWN.value[0], message=str(failure), details=[detail])


def _diff_response(change: Change) -> provider_pb2.DiffResponse:
    replaced = set(change.replaces)
    kind = provider_pb2.PropertyDiff.Kind
    detailed = {
        path: provider_pb2.PropertyDiff(
            kind=kind.Value("UPDATE_REPLACE" if path in replaced else "UPDATE"), inputDiff=True
        )
        for path in {*change.paths, *replaced}
    }
    some = provider_pb2.DiffResponse.DIFF_SOME if detailed else provider_pb2.DiffResponse.DIFF_NONE
    return provider_pb2.DiffResponse(
        changes=some,
        replaces=list(change.replaces),
        deleteBeforeReplace=change.deletes_first,
        diffs=list(change.paths),
        detailedDiff=detailed,
        hasDetailedDiff=True,
    )


def _token(urn: str) -> str:
    """Return the type of a resource, without the types of its parents."""
    return urn.split("::")[2].rpartition("$")[2]


def _name(urn: str) -> str:
    return urn.split("::", 3)[3]


__all__ = ["PROVIDERS", "UNKNOWN", "Provider", "Server"]
