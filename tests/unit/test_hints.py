"""Hints: what is given away, when, and that it counts for nothing but learning."""

from collections.abc import Sequence
from functools import partial

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from node.config import NodeConfig, load_config
from node.engines.vllm.text import ModelText
from node.envs.answers import answer_in
from node.interfaces.engine import Sampling
from node.interfaces.prompts import Prompt, PromptEncoder
from node.methods.hints import BareSuccess, Hints, beginning
from node.observe.records import RoundDone
from node.stages.generate import GiveHints
from node.stages.stage import Stage
from swarm.errors import ConfigError
from swarm.rollouts import Completion, Task
from tests.unit.simulated_pair import rounds_beside
from tests.unit.test_rescue import CONFIG, Kept
from tests.unit.training_support import model_text, open_policy, qwen_directory

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
HINTS = Hints()


def task(index: int = 1) -> Task:
    return Task("scripted_sum", "1", "{}", 7, index)


# --- prompts -----------------------------------------------------------------------------------


def hinted(text: str, hint: str) -> str:
    return Prompt.read(text).begun(hint).text


@pytest.mark.parametrize(
    "prompt",
    [Prompt.of("7+6="), Prompt.of("7+6=", "Add."), Prompt.of("7+6=", "Add.", [("1+1=", "2")])],
)
def test_a_hint_is_apart_from_the_prompt(prompt: Prompt) -> None:
    given = prompt.begun("1")
    assert (prompt.beginning, given.beginning) == ("", "1")
    assert given.begun("13").beginning == "13"  # it takes the place of the first
    assert (given.chat(), given.plain, given.question) == (
        prompt.chat(),
        prompt.plain,
        prompt.question,
    )
    for each in (prompt, given):
        assert Prompt.read(each.text) == each


def word_tokenizer() -> Tokenizer:
    """As those of SentencePiece: a word is a token with the gap before it, and a text loses the gap
    that it begins with."""
    words = ["<unk>", "▁one", "▁two", "▁three", "one", "two", "three"]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def test_a_gap_behind_a_hint_is_there_if_the_policy_made_it() -> None:
    given = hinted("7+6=", "one two ")
    assert Prompt.read(given).continued == "one two"
    tokenizer = word_tokenizer()

    decode = tokenizer.decode

    class Encoder(PromptEncoder):
        def encode_completion(self, text: str) -> list[int]:
            return tokenizer.encode(text).ids

        def decode(self, token_ids: Sequence[int]) -> str:
            return decode(list(token_ids))

    def text(prompt: str, word: str) -> str:
        said = Encoder().text_of(prompt, [tokenizer.token_to_id(word)])
        return Prompt.read(prompt).whole(said)

    assert decode([tokenizer.token_to_id("▁three")]) == "three"
    assert text(given, "▁three") == "one two three"
    assert text(given, "three") == "one twothree"
    assert text("7+6=", "▁three") == "three"  # as its tokenizer says it, without a hint


@pytest.mark.parametrize(("said", "scored"), [("42", "is42"), (" 42", "is 42"), ("\n42", "is\n42")])
def test_what_is_scored_is_what_was_said_where_a_tokenizer_keeps_gaps(
    tmp_path, said, scored
) -> None:
    policy = open_policy(qwen_directory(tmp_path))
    given = hinted("7+6=", "is ")
    ids = policy.encode_completion(said)
    assert Prompt.read(given).whole(policy.text_of(given, [*ids, policy.eos_id])) == scored
    text = ModelText(tmp_path)
    assert text.text_of(given, ids) == policy.text_of(given, ids) == said


def test_an_answer_without_a_question_is_a_question() -> None:
    text = hinted("", "x")[:1] + '[["assistant","x"]]'
    assert Prompt.read(text).beginning == ""
    assert Prompt.read(text).question == text


@pytest.mark.parametrize("template", [None, CHAT])
def test_every_engine_goes_on_from_the_hint_and_none_reads_a_special_token_in_it(
    tmp_path, template
) -> None:
    directory = qwen_directory(tmp_path)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    policy = open_policy(directory)
    hint = f"1{policy.tokenizer.eos_token}2"
    bare = policy.encode_prompt("7+6=")
    ids = policy.encode_prompt(hinted("7+6=", hint))
    assert ids == [*bare, *policy.encode_completion(hint)]
    assert policy.tokenizer.eos_token_id not in ids[len(bare) :]
    text = model_text(directory, policy)
    context = policy.context_tokens
    assert text.encode_prompt(hinted("7+6=", hint)) == ids
    assert text.encode_prompt("7+6=") == bare
    # One that is too long is cut, so that nobody's text stops a node
    long = hinted("7+6=", "1" * 2 * context)
    assert len(policy.encode_prompt(long)) == context - 1
    assert text.encode_prompt(long) == policy.encode_prompt(long)


# --- what is given away, and when --------------------------------------------------------------


def test_a_hint_ends_with_a_word_and_is_never_all() -> None:
    assert beginning("one two three", 0.75) == "one two "
    assert beginning("one two three", 7 / 13) == "one two "
    assert beginning("one two three", 0.4) == "one "
    assert beginning("one\n\n2", 0.99) == "one\n\n"
    assert beginning("one ", 0.99) == "one"  # what is left is a gap
    assert beginning("one two three", 0.2) == "on"  # no whole word fits
    assert beginning("1234", 0.75) == "123"
    assert beginning("1234", 1.0) == "123"
    assert beginning("7", 1.0) == beginning("", 1.0) == beginning("1234", 0.0) == ""


def test_what_is_hard_gets_a_hint_every_other_time() -> None:
    book = BareSuccess(tasks_max=2)
    assert book.hint(task(), ["1234"], 0, HINTS) == ""  # nobody knows yet how hard it is
    book.learn(task(), (0.0, 0.0, 0.0, 0.0))
    assert book.hint(task(), [], 0, HINTS) == ""
    assert book.hint(task(), ["12345678", "1234"], 0, HINTS) == "123"
    assert book.hint(task(), ["1234"], 0, HINTS) == ""
    book.learn(task(), (1.0, 0.0, 0.0, 0.0))
    assert book.hint(task(), ["12345678"], 0, HINTS) == "123"  # half as much
    book.learn(task(), (1.0, 1.0, 0.0, 0.5))
    assert book.hint(task(), ["1234"], 0, HINTS) == ""
    book.learn(task(), (0.0, 0.0))
    assert book.hint(task(), ["1234"], HINTS.steps, HINTS) == ""
    for index in (2, 3):
        book.learn(task(index), (0.0,))
    assert len(book) == 2
    assert book.hint(task(), ["1234"], 0, HINTS) == ""  # given up


def test_a_hint_never_has_the_answer_already() -> None:
    find = partial(answer_in, "last_number")
    for solution, hint in (
        ("13.", ""),
        ("42$", ""),
        ("it is 42", "it is "),
        ("1 makes 42", "1 makes "),
    ):
        book = BareSuccess()
        book.learn(task(), (0.0,))
        assert book.hint(task(), [solution], 0, HINTS, find) == hint


# --- a node ------------------------------------------------------------------------------------


class Helped(Kept):
    """Solves what it has a hint for, in half of its tries, and nothing else."""

    async def generate(
        self, prompts: Sequence[str], completions_each: int, sampling: Sampling, seed: int
    ) -> list[tuple[Completion, ...]]:
        found = []
        for place, prompt in enumerate(prompts):
            self.skill = 0.5 if Prompt.read(prompt).beginning else 0.0
            found += await super().generate([prompt], completions_each, sampling, seed + place)
        return found


def lives(config: NodeConfig) -> tuple[list[RoundDone], Helped]:
    node = Helped(0.0)
    return rounds_beside(config, node, CONFIG, Kept(1.0)), node


def test_a_node_learns_with_hints_and_they_count_for_nothing_else(monkeypatch) -> None:
    plain, _ = lives(CONFIG)
    assert sum(each.hinted_groups for each in plain) == 0
    rounds, node = lives(CONFIG.model_copy(update={"generate": HINTS}))
    assert sum(each.hinted_groups for each in rounds) > len(rounds) / 4
    taught = 0
    for each, batch in zip(rounds, node.batches, strict=True):
        given = [
            group for group in batch if group.own_tokens and Prompt.read(group.prompt).beginning
        ]
        assert len(given) == each.hinted_groups
        assert each.groups_shared == each.local_groups - len(given)
        assert each.answers.completions == each.groups_shared * CONFIG.group_size
        assert each.answers.right == 0
        assert not each.own_reward > 0.0  # nothing without a hint
        for group in given:
            said = Prompt.read(group.prompt)
            answer = str(sum(map(int, said.question.removesuffix("=").split("+"))))
            assert answer.startswith(said.beginning)
            rest = answer.removeprefix(said.beginning)
            for made, worth in zip(group.completions, group.advantages, strict=True):
                assert (worth > 0) == (made.text == rest and any(group.advantages))
            taught += any(group.advantages)
    assert taught > 0
    assert sum(each.acted.get("hints", 0) for each in rounds) >= taught
    monkeypatch.setattr(GiveHints, "plan", Stage.plan)
    idle, _ = lives(CONFIG.model_copy(update={"generate": HINTS}))
    assert sum(each.hinted_groups for each in idle) == 0


def test_what_cannot_hint_says_so(tmp_path) -> None:
    run = tmp_path / "run.toml"
    head = 'name = "r"\n[[environments]]\nname = "scripted_sum"\n'
    run.write_text(head)
    with pytest.raises(ConfigError, match=r"has no tasks that come again: give it common\.share"):
        load_config({"generate": "hints"}, {}, run)
    run.write_text(head + "[common]\nshare = 0.5\n[sampling]\ntop_p = 0.9\n")
    found = load_config({"generate": "hints, share_max=0.5", "engine": "vllm"}, {}, run)
    assert found.generate == (Hints(share_max=0.5),)
    assert found.hears_solutions
    with pytest.raises(ConfigError, match="fetches nothing for hints"):
        load_config({"generate": "hints", "external_groups": "0"}, {}, run)
    with pytest.raises(ConfigError, match="makes no groups for hints"):
        load_config({"generate": "hints", "local_groups": "0"}, {}, run)
