"""What runs on a cluster: the trainer job, by four launchers, and its companions."""
