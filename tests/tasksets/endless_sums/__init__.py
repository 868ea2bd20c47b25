from endless_sums.taskset import EndlessSumsTaskset

__all__ = ["EndlessSumsTaskset"]
