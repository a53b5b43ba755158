"""`tensorboard`: forwards a port of this machine to the stack's TensorBoard."""

from __future__ import annotations

import argparse
import socket
import sys
import threading

from infra.kube_api import Object, api_path
from infra.text import one_line
from trainer.exit_codes import EXIT_OK
from workloads.cli.options import open_run
from workloads.errors import UserError
from workloads.facts import COMPONENT_LABEL
from workloads.objects.tensorboard import PORT, TENSORBOARD
from workloads.runs.run import Run

_CHUNK_BYTES = 65_536


def tensorboard_command(arguments: argparse.Namespace) -> int:
    """Forward the port and print its address, until Ctrl-C."""
    run = open_run(arguments)
    pod = find_ready_pod(run)
    with listen(arguments.port) as server:
        sys.stdout.write(f"http://127.0.0.1:{server.getsockname()[1]}  (pod {pod}; Ctrl-C stops it)\n")
        sys.stdout.flush()
        try:
            serve(server, run, pod)
        except KeyboardInterrupt:
            return EXIT_OK
    return EXIT_OK


def find_ready_pod(run: Run) -> str:
    """Return the name of a ready TensorBoard pod; raise UserError if there is none."""
    pods = run.api.items(api_path(run.namespace, "Pod"), labelSelector=f"{COMPONENT_LABEL}={TENSORBOARD}")
    ready = [pod for pod in pods if _is_ready(pod)]
    if ready:
        return str(ready[0]["metadata"]["name"])
    if pods:
        status = f"python -m workloads status {run.options}"
        raise UserError(f"TensorBoard's pod {pods[0]['metadata']['name']} is not ready. The reason: {status}")
    fix = f"pulumi config set --path job.tensorboard.enabled true, then {run.start_command}"
    raise UserError(f"namespace {run.namespace!r} has no TensorBoard. Fix: {fix}")


def listen(port: int) -> socket.socket:
    """Return a socket that listens on loopback."""
    try:
        return socket.create_server(("127.0.0.1", port))
    except (OSError, OverflowError) as error:
        message = f"cannot listen on this port ({one_line(error)}): got --port {port}"
        raise UserError(f"{message}. Fix: pass another port, or 0 for any free one") from None


def serve(server: socket.socket, run: Run, pod: str) -> None:
    """Forward every connection to the pod, until interrupted."""
    while True:
        local, _ = server.accept()
        threading.Thread(target=forward, args=(local, run, pod), daemon=True).start()


def forward(local: socket.socket, run: Run, pod: str) -> None:
    """Forward one connection to the pod's port and back, until either side closes it."""
    from kubernetes.client import ApiException, CoreV1Api
    from kubernetes.stream import portforward

    with local:
        try:
            connection = portforward(
                CoreV1Api(run.api.client).connect_get_namespaced_pod_portforward, pod, run.namespace, ports=str(PORT)
            )
        except ApiException as error:
            sys.stderr.write(f"pod {pod} refused the connection: {one_line(error.reason)}\n")
            return
        remote = connection.socket(PORT)
        remote.setblocking(True)
        responses = threading.Thread(target=_copy, args=(remote, local), daemon=True)
        responses.start()
        _copy(local, remote)
        responses.join()
        remote.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copy bytes in one direction until the source ends, then shut the target down."""
    try:
        while chunk := source.recv(_CHUNK_BYTES):
            target.sendall(chunk)
        target.shutdown(socket.SHUT_WR)
    except OSError:  # the other side closed the connection
        return


def _is_ready(pod: Object) -> bool:
    """Return whether the pod has the condition Ready."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(item.get("type") == "Ready" and item.get("status") == "True" for item in conditions)
