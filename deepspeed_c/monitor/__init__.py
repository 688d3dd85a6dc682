"""Monitors: the outputs of a run's numbers. ``MonitorMaster`` passes events to the backends that the configuration
enables."""

from .monitor import MONITORS, Event, Monitor, MonitorMaster

__all__ = ["MONITORS", "Event", "Monitor", "MonitorMaster"]
