"""Argument parsing and tables for the command line."""
