from roman_sums.taskset import RomanSumsTaskset

__all__ = ["RomanSumsTaskset"]
