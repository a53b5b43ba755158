"""Pulumi components and helpers shared by several clouds."""
