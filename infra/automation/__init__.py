"""Preview, up, refresh and destroy of a stack from Python; the only package that uses Pulumi's Automation API."""

from infra.automation.errors import CancelledError, OperationError
from infra.automation.outputs import HourlyUsd, StackOutputs
from infra.automation.stack import Changes, LiveStack
from infra.automation.state import State

__all__ = ["CancelledError", "Changes", "HourlyUsd", "LiveStack", "OperationError", "StackOutputs", "State"]
