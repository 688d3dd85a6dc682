"""Profiling of time, memory and floating-point operations."""
