"""What a machine has for models beyond its GPU, judged, with the remedy for what is amiss."""

from hotexperts.doctor.check import Check, Status

__all__ = ["Check", "Status"]
