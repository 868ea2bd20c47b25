from tool_lookup.taskset import ToolLookupTaskset

__all__ = ["ToolLookupTaskset"]
