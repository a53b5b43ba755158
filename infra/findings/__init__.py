"""Findings of checks, and the causes that explain them."""
