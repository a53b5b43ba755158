"""A Pulumi policy pack that enforces this project's promises on every resource of a stack."""
