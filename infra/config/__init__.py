"""The settings of a stack, their validation and the problems in them."""
