"""Arguments and progress output shared by the trainer's commands."""
