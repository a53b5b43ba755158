"""Start the processes of a job, on one machine or on many."""
