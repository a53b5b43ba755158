"""Measure the bandwidth between the processes of a job."""
