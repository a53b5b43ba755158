"""Exit codes of every trainer process. Launchers decide by them whether to restart a pod."""

EXIT_OK = 0
EXIT_FAILED = 1  # a check or an operation failed
EXIT_USER_ERROR = 2  # a restart does not help: a setting, a file or the data must be fixed first
# EX_TEMPFAIL of sysexits.h: saved a checkpoint, start again. Not 143, which is also the code of a process that never
# handled SIGTERM: a podFailurePolicy that ignores 143 would ignore everything that the kubelet ends. torchrun restarts
# after either.
EXIT_RESTART = 75
EXIT_INTERRUPTED = 130  # 128 + SIGINT: Ctrl-C
EXIT_TERMINATED = 143  # 128 + SIGTERM: a second SIGTERM ended the process at once
