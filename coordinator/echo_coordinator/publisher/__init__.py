"""Turning the trainer's weights into signed, durable versions. See `publish`."""

from echo_coordinator.publisher.publish import Published, Publisher, VersionConflict, WeightsFile, head_record

__all__ = ["Published", "Publisher", "VersionConflict", "WeightsFile", "head_record"]
