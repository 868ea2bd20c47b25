"""Questions about a parts catalog that only the tools can read."""

import random
import re

import verifiers.v1 as vf
from pydantic import Field

from tool_lookup.catalog import build_catalog
from tool_lookup.servers.tool import CatalogToolset, CatalogToolsetConfig

SYSTEM_PROMPT = (
    "Use the catalog tools to answer. End your last message with a line of the form "
    '"Answer: N", where N is a whole number.'
)

ANSWER_RE = re.compile(r"^[\s*]*Answer[\s:*]*([\d,]+)[\s.*]*$", re.IGNORECASE | re.MULTILINE)


class ToolLookupData(vf.TaskData):
    """One question about the catalog."""

    codes: list[str]
    """The parts the question is about."""
    answer: int
    """Units in stock of these parts taken together."""


class ToolLookupTaskConfig(vf.TaskConfig):
    """Settings of the tool server."""

    tools: CatalogToolsetConfig = CatalogToolsetConfig()
    """The catalog and the placement of its server."""


class ToolLookupTask(vf.Task[ToolLookupData, vf.State, ToolLookupTaskConfig]):
    """Scores the number in the last message."""

    @classmethod
    def toolsets(cls, config: ToolLookupTaskConfig) -> list[vf.Toolset]:
        return [CatalogToolset(config.tools)]

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        """1.0 when the last answer line has the right number."""
        found = ANSWER_RE.findall(trace.last_reply)
        return float(bool(found) and found[-1].replace(",", "") == str(self.data.answer))

    @vf.metric
    async def num_tool_results(self, trace: vf.Trace) -> float:
        """How many tool results the model received."""
        return float(len(trace.tool_messages))


class ToolLookupConfig(vf.TasksetConfig):
    """Which questions to generate."""

    num_tasks: int = Field(20, ge=1)
    """How many questions to generate."""
    seed: int = 0
    """Seed for choosing the parts to ask about."""
    max_parts: int = Field(3, ge=1)
    """Most parts to add up in one question."""
    task: ToolLookupTaskConfig = ToolLookupTaskConfig()


class ToolLookupTaskset(vf.Taskset[ToolLookupTask, ToolLookupConfig]):
    """Generated questions about the stock of one or more parts."""

    def load(self) -> list[ToolLookupTask]:
        tools = self.config.task.tools
        parts = build_catalog(tools.catalog_seed, tools.catalog_size)
        rng = random.Random(self.config.seed)
        tasks = []
        for i in range(self.config.num_tasks):
            count = rng.randint(1, min(self.config.max_parts, len(parts)))
            chosen = rng.sample(parts, count)
            codes = [part.code for part in chosen]
            data = ToolLookupData(
                name=f"tool_lookup_{i}",
                prompt=(
                    f"How many units are in stock in total of these parts: {', '.join(codes)}?"
                ),
                system_prompt=SYSTEM_PROMPT,
                codes=codes,
                answer=sum(part.stock for part in chosen),
            )
            tasks.append(ToolLookupTask(data, self.config.task))
        return tasks
