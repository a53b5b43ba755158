"""The checks of the doctor as data: findings, causes and how a cluster is queried."""
