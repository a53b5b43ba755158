"""The Grafana dashboard and the Prometheus alerts for training runs."""
