"""Argument parsing and progress output that the trainer's commands share."""
