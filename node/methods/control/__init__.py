"""Choice of tasks, number and length of rollouts, and their admission."""
