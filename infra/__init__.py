"""The resources that `pulumi up` provisions: one folder per cloud behind the contract in `infra.contract`."""
