"""Run a Pulumi program without an engine, with mocks of the outputs that the clouds compute."""
