module torchrec-cloud/tests/cluster/crds

go 1.25.0

require (
	github.com/prometheus-operator/prometheus-operator v0.85.0
	sigs.k8s.io/kueue v0.19.2
)
