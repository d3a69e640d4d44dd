"""What proves that two frameworks, or two topologies, compute the same thing."""

from dualmesh.testing.noise import counter_noise

__all__ = ["counter_noise"]
