"""The calls of the service, without HTTP."""

from rescue_svc.service.service import RescueService

__all__ = ["RescueService"]
