"""Resources that this project provides itself: their errors reach a person as one line."""

from __future__ import annotations

import sys
import traceback
from typing import Any

from pulumi import dynamic


class ServiceError(Exception):
    """What went wrong between this project and a service, in one line for a person."""


class OneLineProvider(dynamic.ResourceProvider):
    """A provider that the engine runs in a process of its own, unpickled from the stack's state.

    It holds no value, so its pickle is no secret, and whatever it needs it imports where it uses it.
    """

    serialize_as_secret_always = False

    def configure(self, _request: dynamic.ConfigureRequest) -> None:
        """Have a ServiceError shown as its one line: Pulumi's servicer sends the text of the whole trace, and asks
        nobody but `traceback` for it."""
        whole = traceback.format_exc

        def shown(*arguments: Any, **options: Any) -> str:
            error = sys.exc_info()[1]
            return str(error) if isinstance(error, ServiceError) else whole(*arguments, **options)

        traceback.format_exc = shown
