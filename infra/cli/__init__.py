"""Arguments and tables of the command line."""
