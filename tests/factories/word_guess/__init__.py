"""A word game, as TRL's page has one: a tool, an error at the end, and a reward function."""

SECRETS = ["crane", "slate", "pilot", "bread", "flint", "gourd"]
TRIES = 3

ROWS = [
    {
        "prompt": [{"role": "user", "content": f"Guess a word of 5 letters.{hint}\n"}],
        "secret": secret,
    }
    for secret in SECRETS
    for hint in (f" It begins with {secret[0]}.", f" It ends with {secret[-1]}.")
]


def feedback_on(guess: str, secret: str) -> str:
    marks = []
    for letter, right in zip(guess, secret, strict=True):
        marks.append("G" if letter == right else "Y" if letter in secret else "X")
    return " ".join(marks)


class WordEnv:
    def __init__(self):
        self.reward = 0.0
        self.done = False

    def reset(self, secret: str, **kwargs) -> str | None:
        self.secret = secret
        self.reward = 0.0
        self.done = False
        self.tries = 0
        return f"You have {TRIES} tries."

    def guess(self, guess: str) -> str:
        """
        Make a guess.

        Args:
            guess: The guessed word, of 5 letters

        Returns:
            The feedback: G for a letter in its place, Y for one in another, X for none.
        """
        if self.done:
            raise ValueError("Game over.")
        if len(guess) != len(self.secret):
            raise ValueError(f"{guess} has not {len(self.secret)} letters.")
        self.tries += 1
        self.reward = (
            1.0 if guess == self.secret else 0.2 * feedback_on(guess, self.secret).count("G") / 5
        )
        self.done = guess == self.secret or self.tries == TRIES
        return feedback_on(guess, self.secret)


def reward_func(environments, **kwargs) -> list[float]:
    return [env.reward for env in environments]
