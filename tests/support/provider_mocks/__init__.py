"""Running a Pulumi program without an engine, with mocks of what the clouds compute."""
