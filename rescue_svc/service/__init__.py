"""What the service does, without HTTP."""

from rescue_svc.service.service import RescueService, Retrieved, SessionState

__all__ = ["RescueService", "Retrieved", "SessionState"]
