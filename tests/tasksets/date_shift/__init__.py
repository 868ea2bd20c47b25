from date_shift.taskset import DateShiftTaskset

__all__ = ["DateShiftTaskset"]
