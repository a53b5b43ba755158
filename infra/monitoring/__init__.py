"""The dashboard and the alerts of a training run, as code."""
