"""Measure the collectives between the processes of a job."""
