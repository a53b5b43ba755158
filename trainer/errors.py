"""The one exception that means "the user can mend this": printed as one line, exit code 2."""


class UserError(ValueError):
    """What is wrong, the value seen, what is legal, and the option or command that mends it.

    Raised for anything a person can put right (an option, a file, a checkpoint of another model). The command line
    prints it without a stack trace and exits with code 2; in a job of several processes only rank 0 prints it.
    """

    reported: bool = False  # already printed by rank 0
