"""The training job of a stack, its supporting Kubernetes objects, and the commands that show and control its runs."""
