"""The Pulumi program: settings, then a cluster, then its operators, then the training job on it."""

from infra import stack
from infra.addons.addons import Addons
from infra.exports import export_all
from infra.settings import JobSettings


def main() -> None:
    """Provision the stack that `Pulumi.<stack>.yaml` describes."""
    configured = stack.load(sections={"job": JobSettings})
    wanted = configured.settings
    job = configured.section("job", JobSettings)

    cluster = configured.cloud.provision(wanted.stack, wanted)
    Addons(
        f"{wanted.stack}-addons",
        cluster,
        launcher=job.launcher,
        monitored=wanted.addons.monitoring,
        queued=wanted.addons.kueue,
    )
    # The training job goes here: it depends on the add-ons' `ready` and on `cluster.before_workloads`.
    export_all(cluster, wanted)


main()
