"""What the policy pack must know about an existing cluster: only its Kubernetes objects belong to the stack."""

from infra.policy_facts import CloudPolicy

#: The image that the development guide loads into the nodes of a local cluster; it has no digest.
POLICY = CloudPolicy(images_by_tag=("trainer:dev",))
