"""The rules by which each dataset of reasoning-gym is offered, or the reason why it is refused.

Each dataset was read line by line, except the generators in `rearc` and `gsm_symbolic`, for four
properties: (1) its scorer runs no code and has bounded time; (2) it reads the whole text, and no
wrong answer is worth 1; (3) all processes make the same problems; (4) in bounded time. Without
(1) or (2) a guard or scorer of `scorers` helps; without (3) or (4) the dataset is refused.

Beyond the notes: `propositional_logic` accepts a copied premise at complexity 2 and above, and
`Q∨P` with two variables at complexity 1. `fraction_simplification` gives 0.01 to any text, so runs
should have `reward = "exact"`. Items that cannot be made, or whose answer their own scorer refuses,
are drawn again, alike on all nodes.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from node.envs.gym import scorers
from node.envs.gym.scorers import Entry, Guard, Scorer

_RUNS: Final = "it runs the answer as Python code"
SHORT: Final = 64  # characters of a number, a name or a word


def _answer(entry: Entry) -> str:
    """A right answer; datasets with several have an example in the metadata."""
    answer = entry["answer"]
    return str(entry["metadata"]["example_answer"] if answer is None else answer).strip()


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules by which a dataset is offered."""

    text_chars_max: int = 1024  # longer answers score 0 unread
    guard: Guard | None = None  # selects texts for the dataset's own scorer; None: any text
    scorer: Scorer | None = None  # instead of the dataset's
    note: str = ""  # fault of the library's scorer
    answer: Callable[[Entry], str] = _answer  # a right one of an entry
    settings_max: Mapping[str, float] = field(default_factory=dict)  # above them it takes too long
    settings_min: Mapping[str, float] = field(default_factory=dict)
    made_with: str = ""  # a package whose version decides the problems
    size: int = 0  # its items are a list: each problem is the first item of a dataset of this size
    is_shared: bool = False  # making it takes long, and its only state is the seed

    @property
    def scored_by(self) -> str:
        if self.scorer is not None:
            return "ours"
        return "the library's" if self.guard is None else "the library's, guarded"


_NUMBER: Final = Rules(
    SHORT, scorers.plain_number, note="it gives a share for text around the number"
)
_OTHER_SPELLINGS: Final = "it reads any spelling of a number, `0012`, `1_2` and `1,2` among them"
_SPELLED_NUMBER: Final = Rules(SHORT, scorers.plain_number, note=_OTHER_SPELLINGS)
_GRIDS: Final = Rules(
    4096,
    scorer=scorers.same_rows,
    note="lines that begin with `Shape: ` are not looked at",
    is_shared=True,
)

OFFERED_BY_GROUP: Final[Mapping[str, Mapping[str, Rules]]] = {
    "algebra": {
        "complex_arithmetic": Rules(
            SHORT, scorers.complex_number, note="`nan` is worth 1, and any spelling is read"
        ),
        "polynomial_equations": Rules(
            256,
            scorers.plain_numbers,
            note="what is no number between two commas is not looked at",
            settings_max={"max_degree": 3, "max_terms": 10},
            made_with="sympy",
        ),
        "simple_equations": replace(_NUMBER, settings_max={"max_terms": 10}, made_with="sympy"),
    },
    "algorithmic": {
        "ab": Rules(settings_max={"length": 20}),
        "base_conversion": Rules(),
        "binary_alternation": _NUMBER,
        "binary_matrix": Rules(65_536, scorer=scorers.same_words, note=_RUNS),
        "caesar_cipher": Rules(is_shared=True),
        "count_primes": replace(_NUMBER, settings_max={"max_n": 100_000}),
        "cryptarithm": Rules(
            256,
            scorers.each_letter_once,
            note="a letter may be named twice, and the last one counts",
            settings_max={"max_words": 6},
        ),
        "game_of_life": Rules(
            4096,
            scorer=scorers.same_but_for_spaces,
            note="cells beyond the board are not looked at",
            settings_max={"grid_size_x": 32, "grid_size_y": 32, "simulation_steps": 32},
        ),
        "game_of_life_halting": Rules(
            SHORT,
            scorer=scorers.same_text,
            note="any text is worth 1",
            settings_max={"grid_size_x": 31, "grid_size_y": 31, "num_oscillators": 32},
            made_with="numpy",
        ),
        "graph_color": Rules(
            scorer=scorers.colours_graph,
            note="keys that are no vertex are not looked at",
            answer=lambda entry: json.dumps(entry["metadata"]["possible_answer"]),
            settings_max={"max_num_vertices": 20, "edge_probability": 0.2},
            settings_min={"num_colors": 3},
        ),
        "group_anagrams": Rules(
            2048,
            scorer=scorers.same_groups,
            note="JSON's escapes spell a word in many ways",
            is_shared=True,
        ),
        "jugs": Rules(
            guard=scorers.jug_steps,
            note="words behind a step are not looked at",
            settings_max={"num_jugs": 3, "difficulty": 12},
        ),
        "letter_counting": _NUMBER,
        "letter_jumble": Rules(
            scorer=scorers.same_words, note="words behind the last one are not looked at"
        ),
        "manipulate_matrix": Rules(4096, settings_max={"max_rows": 20, "max_cols": 20}),
        "number_filtering": Rules(),
        "number_sorting": Rules(
            scorer=scorers.same_but_for_quotes,
            note="`NaN`s are worth 1, and so are numbers that are off by 1",
        ),
        "palindrome_generation": Rules(256),
        "palindrome_partitioning": Rules(
            16_384,
            scorer=scorers.same_partitions,
            note="a partition may be repeated at will",
            settings_max={"max_string_len": 15},
        ),
        "rotate_matrix": Rules(4096, settings_max={"max_n": 20}),
        "rotten_oranges": replace(_NUMBER, settings_max={"max_n": 50}),
        "sentence_reordering": Rules(),
        "spell_backward": Rules(SHORT, is_shared=True),
        "spiral_matrix": Rules(
            4096,
            scorer=scorers.same_words,
            note=_RUNS,
            settings_max={"max_n": 20},
        ),
        "string_insertion": Rules(scorer=scorers.same_text, note=_RUNS),
        "string_manipulation": Rules(),
        "string_splitting": Rules(),
        "string_synthesis": Rules(),
        "word_sequence_reversal": Rules(),
        "word_sorting": Rules(),
    },
    "arc": {
        "arc_1d": Rules(),
        "arc_agi": _GRIDS,
        "rearc": _GRIDS,
    },
    "arithmetic": {
        "basic_arithmetic": Rules(settings_max={"max_digits": 12}),  # it factors its dividends
        "bitwise_arithmetic": Rules(
            256,
            scorers.whole_number_or_hex,
            note=_OTHER_SPELLINGS,
            settings_max={"difficulty": 4},
        ),
        "calendar_arithmetic": Rules(SHORT),
        "chain_sum": _SPELLED_NUMBER,
        "count_bits": _NUMBER,
        "decimal_arithmetic": Rules(SHORT),
        "decimal_chain_sum": _SPELLED_NUMBER,
        "dice": Rules(
            SHORT,
            scorer=scorers.same_text,
            note="ends of lines are not looked at",
            settings_max={"num_dice": 8, "max_dice_size": 100},
        ),
        "fraction_simplification": Rules(128),
        "gcd": Rules(SHORT),
        "gsm_symbolic": Rules(
            SHORT,
            scorer=scorers.same_number,
            note="it looks at the first number of a text alone",
            size=1,
        ),
        "lcm": replace(_NUMBER, settings_max={"max_numbers": 8}),
        "leg_counting": _NUMBER,
        "number_format": _SPELLED_NUMBER,
        "power_function": Rules(
            SHORT,
            scorers.scientific_number,
            note="exponents of any size reach its decimal arithmetic",
            settings_max={"max_exponent": 8},
        ),
        "prime_factorization": Rules(
            256, scorers.factors, note=_OTHER_SPELLINGS, settings_max={"max_value": 10**9}
        ),
        "products": _SPELLED_NUMBER,
    },
    "code": {"bf": Rules()},
    "cognition": {
        "color_cube_rotation": Rules(SHORT),
        "modulo_grid": Rules(
            2048,
            settings_max={
                "size_x": 32,
                "size_y": 32,
                "max_holes": 64,
                "max_divisor": 64,
                "max_target": 64,  # it draws until a cell comes to its target
            },
            settings_min={"max_divisor": 2},  # likewise; of 1, every cell comes to 0
        ),
        "needle_haystack": Rules(SHORT, scorer=scorers.same_text, note="spaces are not looked at"),
        "rectangle_count": replace(
            _SPELLED_NUMBER, settings_max={"max_rectangles": 10, "width": 80, "height": 80}
        ),
        "rubiks_cube": Rules(
            guard=scorers.turns,
            note="`R999999999` becomes a list of so many turns, and what is no turn is passed over",
            answer=lambda entry: str(entry["metadata"]["example_correct_answer"]),
            settings_max={"cube_size": 3, "max_scramble_steps": 100},
            settings_min={"cube_size": 3},
        ),
    },
    "games": {
        "countdown": Rules(
            256,
            scorer=scorers.makes_target,
            note=f"{_RUNS}, by way of sympy",
            settings_max={"max_numbers": 8},
            made_with="sympy",
        ),
        "emoji_mystery": Rules(),
        "kakurasu": Rules(
            256,
            scorers.bits,
            note="characters other than 0 and 1 are not looked at",
            settings_max={"max_rows": 6, "max_cols": 6},
        ),
        "mahjong_puzzle": Rules(SHORT),
        "maze": replace(_NUMBER, settings_max={"max_grid_size": 30}),
        "mini_sudoku": Rules(256),
        "n_queens": Rules(
            scorer=scorers.one_of_all,
            note=_RUNS,
            settings_max={"n": 8},
            is_shared=True,
        ),
        "puzzle24": Rules(
            SHORT,
            scorer=scorers.makes_target,
            note=f"{_RUNS}, by way of sympy, and takes any four numbers",
            made_with="sympy",
        ),
        "sudoku": Rules(settings_max={"max_empty": 50}),
        "survo": Rules(
            scorer=scorers.fills_survo,
            note="words are passed over, and of many right answers it takes one",
            settings_max={"max_board_size": 9},
        ),
        "tower_of_hanoi": Rules(
            8192,
            scorers.disk_moves,
            note="blanks are not looked at",
            settings_max={"max_disks": 7, "max_pegs": 4},
        ),
        "tsumego": Rules(SHORT),
    },
    "geometry": {
        "advanced_geometry": Rules(
            SHORT,
            scorer=scorers.same_measure,
            note="what follows a second comma is not looked at",
            made_with="sympy",
        ),
        "simple_geometry": _NUMBER,
    },
    "graphs": {
        "course_schedule": Rules(SHORT),
        "family_relationships": Rules(SHORT),
        "largest_island": _NUMBER,
        "path_star": Rules(),
        "quantum_lock": Rules(
            128,
            scorers.buttons,
            note="what is no button is passed over",
            settings_max={"difficulty": 10},
        ),
        "shortest_path": Rules(settings_max={"max_rows": 30, "max_cols": 30}),
    },
    "induction": {"acre": Rules(SHORT, size=5)},
    "logic": {
        "aiw": _NUMBER,
        "circuit_logic": Rules(
            SHORT,
            settings_max={"max_terms": 20, "max_inputs": 16},  # it draws all of them in one picture
        ),
        "knights_knaves": Rules(
            scorer=scorers.names_roles,
            note="words that name nobody are passed over",
            settings_max={"n_people": 5, "depth_constraint": 3, "width_constraint": 3},
            settings_min={"n_people": 2, "depth_constraint": 2, "width_constraint": 2},
            made_with="numpy",
        ),
        "propositional_logic": Rules(
            192,
            scorers.plain_formula,
            note="invented names pass, and each doubles its time",
            settings_max={"max_vars": 10, "max_statements": 16, "max_complexity": 8},
        ),
        "self_reference": Rules(SHORT),
        "syllogism": Rules(SHORT),
        "zebra_puzzles": Rules(
            SHORT,
            scorer=scorers.same_in_any_case,
            note="ends of lines are not looked at",
            settings_max={"num_people": 4, "num_characteristics": 4},
        ),
    },
    "probability": {
        "coin_flip": Rules(
            SHORT,
            scorer=scorers.near_number,
            note="`1e999999999` fills the memory, and 0.5123 is worth 1 where 0.5 is right",
            settings_max={"max_trials": 40},
        ),
    },
}

_SETS: Final = "it draws from a set, whose order is another one in each process"
_INTEGRAL: Final = (
    "its scorer runs the answer as Python code, by way of sympy, and any constant may be added to "
    "a right one"
)
_NO_ANSWER: Final = "its problems come without a right answer"

REFUSED_BY_GROUP: Final[Mapping[str, Mapping[str, str]]] = {
    "algebra": {
        "intermediate_integration": _INTEGRAL,
        "polynomial_multiplication": f"{_SETS}, and its scorer runs the answer as Python code",
        "simple_integration": _INTEGRAL,
    },
    "algorithmic": {
        "isomorphic_strings": _SETS,
        "pool_matrix": "it seeds numpy's own random numbers, which takes no seed of 64 bits",
        "ransom_note": _SETS,
        "word_ladder": _SETS,
    },
    "arithmetic": {"time_intervals": "its problems are made from the day's date"},
    "code": {
        "codeio": "it runs programs whose random numbers nobody seeds, and its scorer compares "
        "trees of any size"
    },
    "cognition": {
        "figlet_font": "it draws from a folder of fonts, whose order the file system decides",
        "number_sequence": "one problem in a few thousand squares numbers until memory ends",
    },
    "composite": {"composite": "it is made of others; name those, or a group"},
    "games": {
        "boxnet": _NO_ANSWER,
        "futoshiki": "a problem takes seconds, and no bound holds",
        "knight_swap": _SETS,
        "rush_hour": _NO_ANSWER,
        "sokoban": "one problem in a hundred takes two seconds, which is all that a verifier has",
    },
    "induction": {"list_functions": "it draws from random numbers that nobody seeds"},
}

OFFERED: Final[Mapping[str, Rules]] = {
    name: rules for group in OFFERED_BY_GROUP.values() for name, rules in group.items()
}
REFUSED: Final[Mapping[str, str]] = {
    name: reason for group in REFUSED_BY_GROUP.values() for name, reason in group.items()
}
GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    group: tuple(sorted(members)) for group, members in OFFERED_BY_GROUP.items()
}
