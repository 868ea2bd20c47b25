from graded_essay.taskset import GradedEssayTaskset

__all__ = ["GradedEssayTaskset"]
