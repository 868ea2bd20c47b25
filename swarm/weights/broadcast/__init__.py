"""One version on its way: who sends which piece to whom, and how fast."""
