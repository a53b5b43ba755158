"""The exception for mistakes that the user can fix."""


class UserError(ValueError):
    """A mistake that the user can fix, such as a wrong option, a bad file or a checkpoint of another model.

    The message is one line: what is wrong, the value, the allowed values, and the option or command that fixes it. The
    command line prints it without a stack trace and exits with code 2. In a job of several processes only rank 0
    prints it.
    """

    reported: bool = False  # rank 0 has printed it already
