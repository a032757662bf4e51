"""A run's record done again from one of its cuts: trained (`training`), and on demand sampled too (`sampling`)."""

from contraflow.replay.training import replay

__all__ = ["replay"]
