"""What a training process needs around its steps: process group, precision, preemption, watchdog."""
