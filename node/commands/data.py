"""`swarm-node data`: check a file of questions and answers before a run uses it."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from node.commands.arguments import add_command, say
from node.interfaces.prompts import Prompt
from swarm.texts import printable

ITEMS_SHOWN: Final = 3
CONTRADICTIONS_SHOWN: Final = 5
PLACES_SHOWN: Final = 20
SHOWN_CHARS: Final = 80
COLUMNS: Final = ("question", "answer", "choices", "rule")
SETTINGS: Final = ("tolerance", "relative_tolerance", "ignore_case")


def add_data(commands: Any) -> None:
    def run(options: argparse.Namespace) -> None:
        given = {name: getattr(options, name) for name in (*COLUMNS, "scorer", *SETTINGS)}
        given = {name: value for name, value in given.items() if value is not None}
        sight = Sight(options.model, options.run, say) if options.model else None
        for line in check_file(options.file, given, sight):
            say(line)

    data = commands.add_parser("data", help="questions and answers of your own")
    actions = data.add_subparsers(required=True, metavar="ACTION")
    told = "what a file would be as a run's items; keeps nothing"
    check = add_command(actions, "check", run, told)
    check.add_argument("file", metavar="FILE", help="a file or folder of rows, or a hub's id")
    for column in COLUMNS:
        check.add_argument(
            f"--{column}", metavar="COLUMN", help="its name in the file; default: by its shape"
        )
    check.add_argument("--scorer", metavar="NAME", help="exact (default), numeric, choice, math...")
    check.add_argument("--tolerance", type=float, metavar="X", help="of numeric: absolute")
    check.add_argument("--relative-tolerance", type=float, metavar="X", help="of numeric")
    check.add_argument("--ignore-case", action="store_true", default=None, help="of exact")
    told = "show prompts as this model sees them, and which are too long for it"
    check.add_argument("--model", metavar="MODEL", help=told)
    check.add_argument("--run", metavar="RUN", help="with --model: a run's system prompt, examples")


def check_file(
    name: str, parameters: dict[str, Any], sight: "Sight | None" = None
) -> Iterator[str]:
    """Describe a file, or a data set on the hub, as a run's items, with its table for a run file.
    `sight`: of a policy."""
    from node.envs.data import items as store
    from node.envs.data.dataset import DataRules, located, prompt_of, read_file, told_of
    from node.envs.data.items import Items
    from node.observe.samples import shortened
    from node.observe.text_format import amount

    path = located(name, Path.cwd())
    reading = read_file(path, DataRules.of(parameters))
    rules, content = reading.rules, reading.content
    kept = Items(content.data)
    items = [kept.row(place) for place in range(len(kept))]
    prompts = [prompt_of(item) for item in items]
    answers = [rules.judge.own_answer(item) for item in items]
    yield f"{content.items} items, {amount(len(content.data), 'B')}, {store.sha256_of(content)}"
    yield from told_of(path, reading)
    lengths = sorted(map(len, prompts))
    middle = lengths[len(lengths) // 2]
    yield f"prompts: {lengths[0]} to {lengths[-1]} characters, half of them at most {middle}"
    read = ", ".join(f"{count} {how}" for how, count in sorted(content.readings.items()))
    yield f"answers: {read}; the longest has {max(map(len, answers))} characters"
    yield from _repeated(prompts, answers, content.places)
    yield f"own answers that pass the scorer {rules.scorer}: {len(answers)} of {content.items}"
    if sight is None:
        shown = [Prompt.read(prompt).plain for prompt in prompts[:ITEMS_SHOWN]]
    else:
        yield from sight.lengths(prompts, content.places)
        shown = [sight.rendered(prompt) for prompt in prompts[:ITEMS_SHOWN]]
    for number, (prompt, answer) in enumerate(zip(shown, answers, strict=False), 1):
        yield f"item {number}: {shortened(prompt)!r} is answered by {shortened(answer)!r}"
    yield ""
    named = reading.columns.by_use() if reading.columns.shape else {}
    yield from _table(name, {**parameters, **named, "scorer": rules.scorer})


def _repeated(
    prompts: Sequence[str], answers: Sequence[str], places: Sequence[str]
) -> Iterator[str]:
    """Lines about questions that come again, blanks apart, and those with unlike answers."""
    alike: dict[str, list[int]] = {}
    for at, prompt in enumerate(prompts):
        alike.setdefault(" ".join(prompt.split()), []).append(at)
    again = [group for group in alike.values() if len(group) > 1]
    yield f"questions that come more than once, blanks apart: {len(again)}"
    unlike = [group for group in again if len({answers[at] for at in group}) > 1]
    yield f"contradictions, questions with more than one answer: {len(unlike)}"
    for group in unlike[:CONTRADICTIONS_SHOWN]:
        said = ", ".join(
            f"{printable(answers[at], SHOWN_CHARS)!r} ({places[at]})" for at in group[:ITEMS_SHOWN]
        )
        yield f"  {printable(Prompt.read(prompts[group[0]]).question, SHOWN_CHARS)!r}: {said}"


class Sight:
    """A policy's view of prompts: its tokenizer, template and context, after a run's
    instructions."""

    def __init__(self, model: str, run: str | None, say: Callable[[str], None]) -> None:
        from node.config import load_config
        from node.engines.vllm.text import ModelText
        from node.hosting.models import resolve_model

        config = load_config({"model": model}, {}, Path(run) if run else None)
        self._answer = config.run.answer
        directory = Path(resolve_model(config, say))
        self._text = ModelText(directory, template_rules=config.run.template_rules)

    def _ids(self, prompt: str) -> list[int]:
        told = [(each.question, each.completion) for each in self._answer.examples]
        return self._text.encode_prompt(Prompt.read(prompt).below(self._answer.system, told).text)

    def rendered(self, prompt: str) -> str:
        return self._text.decode(self._ids(prompt))

    def lengths(self, prompts: Sequence[str], places: Sequence[str]) -> Iterator[str]:
        """Lines about the prompts' tokens, and those that a node leaves out for their length."""
        counts = [len(self._ids(prompt)) for prompt in prompts]
        most = self._text.context_tokens
        middle = sorted(counts)[len(counts) // 2]
        yield (
            f"tokens of prompts for {self._text.name}: {min(counts)} to {max(counts)}, half of "
            f"them at most {middle}; its context has {most}"
        )
        long = [f"{places[at]} ({count})" for at, count in enumerate(counts) if count >= most]
        if long:
            more = f" and {len(long) - PLACES_SHOWN} more" if len(long) > PLACES_SHOWN else ""
            yield (
                f"too long for the context, left out by a node: {len(long)} of {len(counts)} "
                f"items: {', '.join(long[:PLACES_SHOWN])}{more}"
            )


def _table(name: str, parameters: dict[str, Any]) -> Iterator[str]:
    from node.envs.data.items import canonical_json

    yield "[[environments]]"
    yield 'name = "dataset"'
    yield "[environments.parameters]"
    file = Path(name).absolute()
    path = str(file) if file.exists() else name  # a data set on the hub
    for key, value in {"path": path, **parameters}.items():
        yield f"{key} = {canonical_json(value)}"
