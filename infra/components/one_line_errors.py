"""Dynamic resources whose errors are shown in one line instead of a stack trace."""

from __future__ import annotations

import sys
import traceback
from types import SimpleNamespace

from pulumi import dynamic


class ServiceError(Exception):
    """A failed request to a cloud service, described in one line."""


class OneLineProvider(dynamic.ResourceProvider):
    """A dynamic provider, which the engine unpickles from the stack's state in a separate process.

    It has no attributes, so its pickle is no secret, and its methods import what they need.
    """

    serialize_as_secret_always = False

    def configure(self, _request: dynamic.ConfigureRequest) -> None:
        """Shorten the errors of Pulumi's servicer, which reports `traceback.format_exc()` of each exception.

        Only the servicer's own reference to `traceback` is replaced: it is the main module of the provider's process.
        """
        servicer = vars(sys.modules["__main__"])
        if "DynamicResourceProviderServicer" in servicer:
            servicer["traceback"] = SimpleNamespace(format_exc=format_current_error)


def format_current_error() -> str:
    """Return the message of a ServiceError that is being handled, the stack trace of any other exception."""
    error = sys.exc_info()[1]
    return str(error) if isinstance(error, ServiceError) else traceback.format_exc()
