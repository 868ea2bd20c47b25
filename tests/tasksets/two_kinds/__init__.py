from two_kinds.taskset import TwoKindsTaskset

__all__ = ["TwoKindsTaskset"]
