"""Monitors: where a run's numbers go. ``MonitorMaster`` hands events to the backends that the configuration enables."""

from .monitor import MONITORS, Event, Monitor, MonitorMaster

__all__ = ["MONITORS", "Event", "Monitor", "MonitorMaster"]
