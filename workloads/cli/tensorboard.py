"""`tensorboard`: the stack's TensorBoard on a port of this machine, until Ctrl-C."""

from __future__ import annotations

import argparse
import socket
import sys
import threading

from infra.kube_api import Object, api_path
from infra.text import one_line
from workloads.cli.errors import EXIT_OK, CliError
from workloads.cli.target import Target, open_target
from workloads.facts import COMPONENT_LABEL
from workloads.objects.tensorboard import PORT, TENSORBOARD

_PIECE = 65_536


def tensorboard_command(arguments: argparse.Namespace) -> int:
    """Forward the port and say the address; Ctrl-C is how it ends."""
    target = open_target(arguments)
    pod = ready_pod(target)
    with listen(arguments.port) as server:
        sys.stdout.write(f"http://127.0.0.1:{server.getsockname()[1]}  (pod {pod}; Ctrl-C ends it)\n")
        sys.stdout.flush()
        try:
            serve(server, target, pod)
        except KeyboardInterrupt:
            return EXIT_OK
    return EXIT_OK


def ready_pod(target: Target) -> str:
    """A pod of TensorBoard that answers."""
    pods = target.api.items(api_path(target.namespace, "Pod"), labelSelector=f"{COMPONENT_LABEL}={TENSORBOARD}")
    ready = [pod for pod in pods if _is_ready(pod)]
    if ready:
        return str(ready[0]["metadata"]["name"])
    status = f"`python -m workloads status {target.options}` says why"
    if pods:
        raise CliError(f"TensorBoard's pod {pods[0]['metadata']['name']} is not ready; {status}")
    mend = f"`pulumi config set --path job.tensorboard.enabled true`, then `{target.again}`"
    raise CliError(f"there is no TensorBoard in namespace {target.namespace!r}; {mend}")


def listen(port: int) -> socket.socket:
    """A listening socket on this machine alone."""
    try:
        return socket.create_server(("127.0.0.1", port))
    except (OSError, OverflowError) as error:
        raise CliError(f"--port is {port}: {one_line(error)}; choose another, or 0 for any free one") from None


def serve(server: socket.socket, target: Target, pod: str) -> None:
    """Carry each connection to the pod, until interrupted."""
    while True:
        local, _ = server.accept()
        threading.Thread(target=carry, args=(local, target, pod), daemon=True).start()


def carry(local: socket.socket, target: Target, pod: str) -> None:
    """One connection to the pod's port and back, until either side closes."""
    from kubernetes.client import ApiException, CoreV1Api
    from kubernetes.stream import portforward

    with local:
        try:
            forward = portforward(
                CoreV1Api(target.api.client).connect_get_namespaced_pod_portforward,
                pod,
                target.namespace,
                ports=str(PORT),
            )
        except ApiException as error:
            sys.stderr.write(f"pod {pod} takes no connection: {one_line(error.reason)}\n")
            return
        remote = forward.socket(PORT)
        remote.setblocking(True)
        back = threading.Thread(target=_copy, args=(remote, local), daemon=True)
        back.start()
        _copy(local, remote)
        back.join()
        remote.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Bytes one way, and the end of them too."""
    try:
        while piece := source.recv(_PIECE):
            target.sendall(piece)
        target.shutdown(socket.SHUT_WR)
    except OSError:  # the other side has gone: nothing is left to carry
        return


def _is_ready(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(item.get("type") == "Ready" and item.get("status") == "True" for item in conditions)
