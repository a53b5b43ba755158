"""The settings of a stack, their validation and the problems found in them."""
