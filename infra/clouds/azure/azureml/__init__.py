"""Azure Machine Learning: the workspace and the jobs that run in it."""
