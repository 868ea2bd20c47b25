"""The algorithms of a step: small functions of rewards, log-probs and tokens."""
