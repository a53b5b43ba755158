"""`python -m trainer preprocess`: Criteo's text to files that the trainer reads."""
