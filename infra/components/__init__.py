"""Pulumi components and helpers that several clouds share."""
